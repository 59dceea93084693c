"""The command line. Commands import what they need when they run, so that `--help` is instant."""

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlpipe import __version__
from rlpipe.commands.default_command import WithDefaultCommand
from rlpipe.commands.environment import make_folder_importable, set_defaults
from rlpipe.commands.user_errors import one_sentence
from rlpipe.config.load import load_config
from rlpipe.config.save import resolved_yaml
from rlpipe.shared import interrupts
from rlpipe.shared.collection import skip_collection_at_exit
from rlpipe.shared.errors import ConfigError
from rlpipe.shared.secret_text import hide_in_tracebacks

if TYPE_CHECKING:
    from rlpipe.training.opening import Opening


def example(command: str) -> str:
    """What stands below a command's options in its help."""
    return f"Example: {command}"


app = typer.Typer(
    help="GRPO post-training with Ray, SGLang and Megatron-core, on a laptop CPU or a GPU cluster.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    epilog="Start with: rlpipe doctor, then rlpipe recipes list.",
)

dashboards = typer.Typer(help="Dashboards as code.", no_args_is_help=True)
app.add_typer(dashboards, name="dashboard")
recipes = typer.Typer(help="Configurations that come with rlpipe.", no_args_is_help=True)
app.add_typer(recipes, name="recipes")
environments = typer.Typer(help="Environments that a policy acts in.", no_args_is_help=True)
app.add_typer(environments, name="env")
launches = typer.Typer(
    cls=WithDefaultCommand,
    help="Train on a cluster: `rlpipe launch CONFIG --cluster NAME [KEY=VALUE]...`; and what becomes of it.",
    no_args_is_help=True,
)
app.add_typer(launches, name="launch")
commguard = typer.Typer(help="The memory guard of collectives.", no_args_is_help=True)
app.add_typer(commguard, name="commguard")

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML configuration.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings that replace the file's.")
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Continue from the newest whole checkpoint; --resume=NAME from that one.")
]
ResumeFrom = Annotated[
    str | None, typer.Option(metavar="NAME", help="The same as --resume=NAME: a checkpoint's folder, or its iteration.")
]
AllowChange = Annotated[
    list[str] | None,
    typer.Option(metavar="KEY", help="With --resume: this setting may differ, although it changes the experiment."),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace a run of the same name.")]
ClusterName = Annotated[str, typer.Option("--cluster", help="A file, or a name in configs/clusters.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check everything that needs no cluster, then stop.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show a traceback with an error.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"rlpipe {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Options of the program itself."""


@app.command(epilog=example("rlpipe train configs/demo/arithmetic.yaml run.iterations=4"))
def train(
    config: ConfigPath,
    overrides: Overrides = None,
    dry_run: DryRun = False,
    resume: Resume = False,
    resume_from: ResumeFrom = None,
    allow_change: AllowChange = None,
    overwrite: Overwrite = False,
    requeued: Annotated[
        bool, typer.Option("--requeued", help="--resume where there is a checkpoint, --overwrite where there is none.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Train a policy with GRPO."""
    with one_sentence(debug):
        settings = load_config(config, overrides or [])
        if dry_run:
            from rlpipe.generation.inputs import load_inputs
            from rlpipe.training.memory_choice import check_process_count
            from rlpipe.training.opening import check_place
            from rlpipe.training.policy_checks import check_algorithm, check_policy
            from rlpipe.training.trained_share import trained_notes

            check_process_count(settings)
            check_place(settings)
            inputs = load_inputs(settings)
            check_policy(inputs.config)
            check_algorithm(inputs.config)
            typer.echo("\n".join((inputs.summary, *trained_notes(inputs.config))))
            return
        from rlpipe.training.train import train as run_training

        if requeued:
            from rlpipe.training.checkpoints import has_checkpoint

            resume = has_checkpoint(settings)
            overwrite = not resume
        _finish(run_training(settings, _opening(resume, overwrite, resume_from, allow_change)))


@app.command(epilog=example("rlpipe sft configs/demo/sft.yaml --dry-run"))
def sft(
    config: ConfigPath,
    overrides: Overrides = None,
    dry_run: DryRun = False,
    resume: Resume = False,
    resume_from: ResumeFrom = None,
    allow_change: AllowChange = None,
    overwrite: Overwrite = False,
    debug: Debug = False,
) -> None:
    """Train a policy on prompts with answers, or on conversations."""
    with one_sentence(debug):
        from rlpipe.training.sft import read_supervised_inputs
        from rlpipe.training.sft import sft as run_sft

        settings = load_config(config, overrides or [])
        if dry_run:
            from rlpipe.training.opening import check_place

            check_place(settings)
            typer.echo(read_supervised_inputs(settings, resumed=False).summary)
            return
        _finish(run_sft(settings, _opening(resume, overwrite, resume_from, allow_change)))


@app.command("warm-up", epilog=example("rlpipe warm-up configs/gpu/arithmetic.yaml"))
def warm_up(config: ConfigPath, overrides: Overrides = None, debug: Debug = False) -> None:
    """Compile every kernel of a run into the caches, on both sides, without running it."""
    with one_sentence(debug):
        from rlpipe.commands.warm_up_command import warm_up as fill_caches

        typer.echo(fill_caches(load_config(config, overrides or [])))


@app.command("eval", epilog=example("rlpipe eval configs/demo/arithmetic.yaml model.path=runs/demo/policy"))
def evaluate(config: ConfigPath, overrides: Overrides = None, dry_run: DryRun = False, debug: Debug = False) -> None:
    """Evaluate the policy at `model.path` on the evaluation sets."""
    with one_sentence(debug):
        from rlpipe.commands.evaluate import evaluate as run_evaluation
        from rlpipe.commands.evaluate import read_evaluation_inputs

        settings = load_config(config, overrides or [])
        if dry_run:
            typer.echo(read_evaluation_inputs(settings).summary)
            return
        typer.echo(json.dumps(run_evaluation(settings), indent=2))


@app.command("export", epilog=example("rlpipe export runs/demo@20 exported/demo-20"))
def export_policy(
    run: Annotated[str, typer.Argument(metavar="RUN[@ITERATION]", help="Folder of a run; its newest checkpoint.")],
    output: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write.")],
    merge: Annotated[
        bool, typer.Option("--merge", help="Of a run with adapters: the whole model, merged with them.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a folder of that name.")] = False,
    debug: Debug = False,
) -> None:
    """Write a checkpoint's policy in Hugging Face layout, on a CPU: for transformers, SGLang and vLLM.

    Of a run with adapters they alone are written, for PEFT, unless --merge is given."""
    with one_sentence(debug):
        from rlpipe.commands.export_policy import export_policy as run_export

        typer.echo(f"{run_export(run, output, merge, overwrite)} -> {output}")


@app.command(epilog=example("rlpipe report runs/first runs/second"))
def report(
    run_dirs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folder of a run; several are compared.")],
    table: Annotated[
        bool, typer.Option("--table", help="Print speeds by iteration, over a window and in all instead.")
    ] = False,
    skip: Annotated[int, typer.Option(help="Last iteration that counts as warm-up in the table.")] = 1,
    window: Annotated[int, typer.Option(min=1, help="Iterations of the table's window.")] = 10,
    output: Annotated[Path, typer.Option(help="The page of a comparison.")] = Path("comparison.html"),
    debug: Debug = False,
) -> None:
    """Draw a run: report.png and report.html in its folder. Several runs: one page that compares them."""
    with one_sentence(debug):
        run_dir, *others = run_dirs
        if others and table:
            raise ConfigError("--table is about one run: give one folder, or leave --table out")
        if others:
            from rlpipe.monitoring.report.comparison import write_comparison

            typer.echo(f"comparison: {write_comparison(run_dirs, output)}")
            return
        if not table:
            _show_report(run_dir)
            return
        from rlpipe.monitoring.report.history import read_history
        from rlpipe.monitoring.report.table import performance_table

        history = read_history(run_dir)
        typer.echo(performance_table(history, skip, window))
        for note in history.notes:
            typer.echo(note, err=True)


@app.command(epilog=example("rlpipe status runs/demo"))
def status(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")], debug: Debug = False
) -> None:
    """Say how a run stands: going on or not, iteration, time left, reward, checkpoint, faults."""
    with one_sentence(debug):
        from rlpipe.commands.run_status import run_status

        typer.echo(run_status(run_dir))


@app.command(epilog=example("rlpipe health runs --silent-seconds 1800"))
def health(
    runs: Annotated[Path, typer.Argument(metavar="[RUNS]", help="Folder of runs, as run.directory.")] = Path("runs"),
    silent_seconds: Annotated[
        float, typer.Option("--silent-seconds", min=1, help="A run that writes nothing for longer is not healthy.")
    ] = 3600.0,
    debug: Debug = False,
) -> None:
    """Say by the exit code whether the runs that this machine holds still move, as a container's health check asks."""
    with one_sentence(debug):
        from rlpipe.commands.run_health import check_health

        typer.echo(check_health(runs, silent_seconds))


@app.command(epilog=example("rlpipe logs runs/demo engine --follow"))
def logs(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")],
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Parts of log names, for instance engine_0.")
    ] = None,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, max=10**9, help="Last lines of each log.")] = 20,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what is added.")] = False,
    debug: Debug = False,
) -> None:
    """Print the last lines of the logs of a run's workers."""
    with one_sentence(debug):
        from rlpipe.commands.run_logs import run_logs

        for line in run_logs(run_dir, names or [], lines, follow):
            typer.echo(line)


@app.command("config", epilog=example("rlpipe config configs/recipes/qwen3_8b_dapo.yaml"))
def show_config(config: ConfigPath, overrides: Overrides = None, debug: Debug = False) -> None:
    """Print the resolved configuration."""
    with one_sentence(debug):
        typer.echo(resolved_yaml(load_config(config, overrides or [])), nl=False)


@app.command(epilog=example("rlpipe flops qwen3_5_35b_a3b --seqlens 8192,32768"))
def flops(
    model: Annotated[str, typer.Argument(help="A config.json, its folder, or a name in configs/models.")],
    seqlens: Annotated[str, typer.Option(help="Real sequence lengths in tokens, separated by commas.")],
    convention: Annotated[
        str, typer.Option(help="Attention convention: causal_half, causal_exact or full.")
    ] = "causal_half",
    as_json: Annotated[bool, typer.Option("--json", help="Print integers as JSON.")] = False,
    debug: Debug = False,
) -> None:
    """Count a model's FLOPs for given sequence lengths, by layer type."""
    with one_sentence(debug):
        from rlpipe.commands.flops import parse_seqlens, run_flops

        typer.echo(run_flops(model, parse_seqlens(seqlens), convention, as_json))


@app.command("cards", epilog=example("rlpipe cards claims"))
def show_cards(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Cards or kinds of cards, to be shown whole.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Print what was seen of each claim, and whether its code has changed since: seen, stale, unknown or never run."""
    with one_sentence(debug):
        from rlpipe.commands.cards.cards_command import cards_text

        typer.echo(cards_text(names or []))


@app.command(epilog=example("rlpipe doctor configs/demo/arithmetic.yaml --quick"))
def doctor(
    config: Annotated[Path | None, typer.Argument(metavar="[CONFIG]", help="YAML configuration.")] = None,
    overrides: Overrides = None,
    quick: Annotated[bool, typer.Option("--quick", help="Leave out the iteration that is run for real.")] = False,
    cluster: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="The nodes of this Ray cluster instead: auto, host:port, or a cluster."),
    ] = None,
    debug: Debug = False,
) -> None:
    """Test this machine, and with CONFIG its run: each line ok, warn or fail, with the fix."""
    with one_sentence(debug):
        from rlpipe.commands.doctor.check import Status
        from rlpipe.commands.doctor.doctor_command import diagnose

        failed = 0
        for check in diagnose(config, overrides or [], quick, cluster):
            typer.echo(check.line())
            failed += check.status is Status.FAIL
        if failed:
            raise typer.Exit(1)


@app.command(epilog=example("rlpipe plan configs/recipes/qwen3_8b_dapo.yaml --cluster local_8x80gb"))
def plan(
    config: ConfigPath,
    cluster: ClusterName = "local_cpu",
    overrides: Overrides = None,
    prompt_tokens: Annotated[
        int | None, typer.Option(min=1, help="Assumed mean length of a prompt; the limit when not given.")
    ] = None,
    response_tokens: Annotated[
        int | None, typer.Option(min=1, help="Assumed mean length of a response; the limit when not given.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print numbers as JSON.")] = False,
    debug: Debug = False,
) -> None:
    """Say what a run will take: memory by part, disk, seconds by phase. Exit code 1 when it does not fit."""
    with one_sentence(debug):
        from rlpipe.commands.plan.plan_command import run_plan
        from rlpipe.estimate.run_estimate import MeanTokens

        answer = run_plan(config, overrides or [], cluster, MeanTokens(prompt_tokens, response_tokens))
        typer.echo(answer.as_json() if as_json else answer.text())
        if not answer.fits:
            raise typer.Exit(1)


@launches.command(
    "run", epilog=example("rlpipe launch configs/recipes/qwen3_8b_dapo.yaml --cluster slurm_2x8x141gb --dry-run")
)
def launch(
    config: ConfigPath,
    cluster: ClusterName,
    overrides: Overrides = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print exactly what would run.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Launch what does not fit by its plan, too.")] = False,
    debug: Debug = False,
) -> None:
    """Train on a cluster (this machine, Ray, Slurm, Kubernetes); what cannot fit is refused. `run` may be left out."""
    with one_sentence(debug):
        from rlpipe.commands.launch import launch as prepare_launch

        prepared = prepare_launch(config, overrides or [], cluster, force)
        if dry_run:
            typer.echo(prepared.script(), nl=False)
            return
        if prepared.plan:
            typer.echo(prepared.plan, err=True)
        raise typer.Exit(prepared.run())


@launches.command(
    "status", epilog=example("rlpipe launch status configs/demo/arithmetic.yaml --cluster slurm_2x8x141gb")
)
def launch_status(config: ConfigPath, cluster: ClusterName, overrides: Overrides = None, debug: Debug = False) -> None:
    """Say how the jobs of a launched run stand, and the run itself."""
    with one_sentence(debug):
        from rlpipe.commands.launch import job_status

        typer.echo(job_status(config, overrides or [], cluster))


@launches.command(
    "cancel", epilog=example("rlpipe launch cancel configs/demo/arithmetic.yaml --cluster slurm_2x8x141gb")
)
def launch_cancel(
    config: ConfigPath,
    cluster: ClusterName,
    overrides: Overrides = None,
    now: Annotated[bool, typer.Option("--now", help="Without a checkpoint.")] = False,
    debug: Debug = False,
) -> None:
    """Save a checkpoint and end a launched run."""
    with one_sentence(debug):
        from rlpipe.commands.launch import cancel_job

        typer.echo(cancel_job(config, overrides or [], cluster, now))


@launches.command(
    "requeue", epilog=example("rlpipe launch requeue configs/demo/arithmetic.yaml --cluster slurm_2x8x141gb")
)
def launch_requeue(config: ConfigPath, cluster: ClusterName, overrides: Overrides = None, debug: Debug = False) -> None:
    """Save a checkpoint and let a Slurm job wait in the queue again, where it resumes."""
    with one_sentence(debug):
        from rlpipe.commands.launch import requeue_job

        typer.echo(requeue_job(config, overrides or [], cluster))


@recipes.command("list")
def list_recipes() -> None:
    """Print the name and purpose of each configuration: of runs, and of clusters."""
    with one_sentence(debug=False):
        from rlpipe.commands.recipes import list_recipes as find_recipes

        found = find_recipes()
        width = max(len(name) for name, _ in found)
        for name, purpose in found:
            typer.echo(f"{name:<{width}}  {purpose}")


@recipes.command("copy", epilog=example("rlpipe recipes copy demo/arithmetic --to work"))
def copy_recipe(
    name: Annotated[str, typer.Argument(help="As `rlpipe recipes list` prints it, for instance demo/arithmetic.")],
    folder: Annotated[Path, typer.Option("--to", help="Folder that gets a folder configs.")] = Path(),
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace files that are there and differ.")] = False,
    debug: Debug = False,
) -> None:
    """Copy a configuration, and what it is based on, to work with."""
    with one_sentence(debug):
        from rlpipe.commands.recipes import copy_recipe as run_copy

        first, *bases = run_copy(name, folder, overwrite)
        typer.echo("\n".join([str(first), *(f"  based on {base}" for base in bases)]))


@app.command()
def replay(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")],
    episode: Annotated[
        str,
        typer.Argument(metavar="[EPISODE]", help="Name of an episode, or a part of it; without it, all are listed."),
    ] = "",
    debug: Debug = False,
) -> None:
    """Print an episode of several turns: what was shown, written, earned and trained."""
    with one_sentence(debug):
        from rlpipe.commands.replay_episode import replay as replay_episode

        for line in replay_episode(run_dir, episode):
            typer.echo(line)


@environments.command("check")
def check_environment(
    config: ConfigPath,
    overrides: Overrides = None,
    episodes: Annotated[int, typer.Option(min=1, help="Episodes to try.")] = 4,
    say: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="A turn of the stand-in; several in order, then nonsense.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Try the environment of a configuration without a model: resets, turns, tools, rewards, cleanup."""
    with one_sentence(debug):
        from rlpipe.commands.environment_check import check_environment as run_check

        for line in run_check(load_config(config, overrides or []), episodes, say or []):
            typer.echo(line)


@dashboards.command("wandb")
def wandb_dashboard(
    entity: Annotated[str, typer.Option(help="User or team in Weights & Biases.")] = "",
    project: Annotated[str, typer.Option(help="Its project.")] = "rlpipe",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be sent, and send nothing.")] = False,
    debug: Debug = False,
) -> None:
    """Make a workspace with the panels of time, speed, ranks, compilation and learning."""
    with one_sentence(debug):
        from rlpipe.monitoring.wandb_workspace import as_json, create, workspace

        view = workspace(entity, project)
        typer.echo(as_json(view) if dry_run else create(view))


@commguard.command("profile", epilog=example("rlpipe commguard profile configs/gpu/arithmetic.yaml --iterations 5"))
def profile_collectives(
    config: ConfigPath,
    overrides: Overrides = None,
    iterations: Annotated[int, typer.Option(min=2, help="Iterations to measure.")] = 3,
    output: Annotated[Path, typer.Option(help="The policy file to write.")] = Path("comm-guard.yaml"),
    tolerance_mebibytes: Annotated[
        int, typer.Option(help="Fall of driver memory in a later call up to which an operation is skipped.")
    ] = 128,
    threshold_share: Annotated[float, typer.Option(help="Share of the device to keep free.")] = 0.04,
    debug: Debug = False,
) -> None:
    """Train a few iterations, measure every collective, and write the policy that follows."""
    with one_sentence(debug):
        from rlpipe.commands.commguard import profile

        table = profile(
            config,
            overrides or [],
            iterations=iterations,
            output=output,
            tolerance_bytes=tolerance_mebibytes * 2**20,
            share=threshold_share,
        )
        typer.echo(f"{table}\npolicy: {output}")


@commguard.command("show")
def show_policy(
    policy: Annotated[Path | None, typer.Argument(help="A policy file; the default policy when left out.")] = None,
    debug: Debug = False,
) -> None:
    """Print a policy with its evidence."""
    with one_sentence(debug):
        from rlpipe.commands.commguard import show

        typer.echo(show(policy))


def main() -> None:
    """Run the command line. SIGTERM ends a run as cleanly as Ctrl-C does."""
    hide_in_tracebacks()
    set_defaults()
    skip_collection_at_exit()
    make_folder_importable()
    interrupts.install()
    app(_with_resume_name(sys.argv[1:]))


def _opening(resume: bool, overwrite: bool, checkpoint: str | None, allow_changes: list[str] | None) -> "Opening":
    from rlpipe.training.opening import Opening

    resume = resume or checkpoint is not None
    if resume and overwrite:
        raise ConfigError("--resume continues a run and --overwrite replaces it: give one of them")
    if allow_changes and not resume:
        raise ConfigError("--allow-change is about a run that is continued: give it with --resume")
    return Opening(resume, overwrite, checkpoint, tuple(allow_changes or ()))


def _with_resume_name(arguments: Sequence[str]) -> list[str]:
    """`--resume` alone is a flag; `--resume=NAME` is `--resume-from=NAME`."""
    return [re.sub(r"^--resume=", "--resume-from=", argument) for argument in arguments]


def _finish(folder: Path) -> None:
    from rlpipe.monitoring.report.history import read_history
    from rlpipe.monitoring.report.series import held_out, text, unit

    history = read_history(folder)
    for name in held_out(history.names("eval/")):
        _, values = history.series(name)
        _, data, what = name.split("/")
        before, after = (text(value, unit(name)) for value in (values[0], values[-1]))
        typer.echo(f"held-out {what.removesuffix('_mean')} ({data}): {before} before, {after} after training")
    _show_report(folder)


def _show_report(folder: Path) -> None:
    from rlpipe.monitoring.report import write_report

    files = write_report(folder)
    typer.echo(f"picture: {files.picture}\nreport:  {files.page}")
