"""The look of a report's page, light and dark."""

from rlpipe.monitoring.report.series import DARK, LIGHT


def style() -> str:
    """The page's style sheet."""
    variables = [" ".join(f"--c{slot}: {color};" for slot, color in enumerate(colors)) for colors in (LIGHT, DARK)]
    slots = "".join(
        f".f{n} {{ fill: var(--c{n}) }} .s{n} {{ stroke: var(--c{n}) }} .b{n} {{ background: var(--c{n}) }}\n"
        for n in range(len(LIGHT))
    )
    return (
        f":root {{ color-scheme: light dark; {_LIGHT} {variables[0]} }}\n"
        f"@media (prefers-color-scheme: dark) {{ :root {{ {_DARK} {variables[1]} }} }}\n{_RULES}{slots}"
    )


_LIGHT = (
    "--page: #f6f7f9; --card: #ffffff; --ink: #1c2128; --soft: #5b6470; --line: #e3e6eb; --head: #f0f2f5; "
    "--good: #1f7a45; --goodback: #e3f4ea; --bad: #b3332c; --badback: #fbe9e7; --note: #fff7e0; --noteline: #e5b93c;"
)
_DARK = (
    "--page: #12151a; --card: #1b2027; --ink: #e6e9ee; --soft: #9aa4b2; --line: #2e3540; --head: #242a33; "
    "--good: #7fd6a2; --goodback: #173326; --bad: #f39a93; --badback: #3a1f1e; --note: #2c2718; --noteline: #b8902c;"
)
_RULES = """
* { box-sizing: border-box }
body { font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; margin: 0; background: var(--page);
  color: var(--ink); overflow-wrap: anywhere }
main { max-width: 1320px; margin: 0 auto; padding: 1.6em clamp(.8em, 3vw, 2.2em) 4em }
h1 { font-size: 1.6em; line-height: 1.2; margin: 0 0 .2em } h2 { font-size: 1.15em; margin: 2.2em 0 .7em }
.lead { color: var(--soft); margin: 0 0 1.2em }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 168px), 1fr)); gap: .7em }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: .7em .9em }
.card small { color: var(--soft); display: block } .card b { font-size: 1.15em; font-weight: 650; white-space: nowrap }
.advice { background: var(--note); border-left: 4px solid var(--noteline); border-radius: 6px; margin: 1.2em 0;
  padding: .7em 1em .7em 2em } .advice li { margin: .25em 0 }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 350px), 1fr)); gap: .9em }
figure { margin: 0; background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: .75em .8em }
figcaption { font-weight: 600; line-height: 1.25 } figcaption::first-letter { text-transform: uppercase }
.unit { color: var(--soft); font-size: 11.5px; margin: 0; line-height: 1.3 }
svg { display: block; width: 100%; height: auto; margin-top: .2em }
svg text { font: 10.5px system-ui, sans-serif; fill: var(--soft); font-variant-numeric: tabular-nums }
.grid { stroke: var(--line) } .tick { stroke: var(--soft) }
.line { fill: none; stroke-width: 1.8; stroke-linejoin: round }
polygon { fill-opacity: .88 } .at > rect { fill: transparent } .at > .tip { visibility: hidden; pointer-events: none }
.at:hover > .tip { visibility: visible } .tip line { stroke: var(--soft); stroke-dasharray: 2 2 }
.tip .box { fill: var(--card); stroke: var(--line); filter: drop-shadow(0 1px 3px rgba(0, 0, 0, .25)) }
.tip text { fill: var(--ink) }
.legend { display: flex; flex-wrap: wrap; gap: .1em .9em; font-size: 12px; color: var(--soft); margin-top: .3em }
.legend i { display: inline-block; width: 10px; height: 10px; margin-right: 5px; border-radius: 3px }
.quiet { color: var(--soft); margin: .8em 0 0 }
.scroll { overflow-x: auto; background: var(--card); border: 1px solid var(--line); border-radius: 10px }
.scroll.long { max-height: 32em; overflow-y: auto }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: 13.5px }
th, td { padding: .4em .8em; text-align: right; white-space: nowrap }
th { background: var(--head); font-weight: 600; position: sticky; top: 0 }
td:first-child, th:first-child { text-align: left } tr + tr td { border-top: 1px solid var(--line) }
td.text, th.text { text-align: left; white-space: normal; min-width: 15em }
.bar { display: inline-block; height: 9px; border-radius: 3px; vertical-align: baseline; margin-right: 6px; width: 9px }
.samples { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 400px), 1fr)); gap: .9em }
.sample { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: .8em; min-width: 0 }
.sample header { display: flex; flex-wrap: wrap; gap: .4em; align-items: center; font-size: 12.5px;
  color: var(--soft) }
.badge { border-radius: 99px; padding: .05em .7em; background: var(--head); color: var(--ink) }
.badge.good { background: var(--goodback); color: var(--good) }
.badge.bad { background: var(--badback); color: var(--bad) }
.sample small { color: var(--soft); display: block; margin: .6em 0 .1em }
pre { background: var(--head); border-radius: 6px; padding: .6em .8em; margin: 0; overflow: auto; max-height: 16em;
  white-space: pre-wrap; font: 12.5px/1.45 ui-monospace, monospace }
.episode { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: .6em .8em }
.episode small { color: var(--soft); display: block; margin: .5em 0 .1em } .episode .context pre { background: none }
.episode .policy pre { border-left: 3px solid var(--good) } .episode .policy { margin-left: 1em }
details { margin: .8em 0 } summary { cursor: pointer; color: var(--soft) }
details pre { max-height: none; margin-top: .5em }
"""
