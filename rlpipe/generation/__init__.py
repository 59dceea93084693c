"""From prompts to graded samples: asking the engines, grading, filtering, and handing out batches."""
