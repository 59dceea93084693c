"""What the pool adds to raw SGLang, piece by piece, in one run on one device.

Each contender answers the same prompts at a short and at a long forced length. Two lengths tell a decoding step, which
is the slope, from what a batch costs once: the way in, prefill, the way out. Then the stacks of both schedulers' main
threads are looked at while they decode: a scheduler that waits for the device is not what holds it up.
"""

import asyncio
import re
import signal
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import ray
from inside_engine import begin_trace, in_engine
from kernel_groups import print_trace
from raw_engine import start_raw

from rlpipe.config.root import Config
from rlpipe.training.placement import Placement
from rollout.fleet import RunningEngine
from rollout.pool import RolloutPool
from rollout.requests import GenerateRequest, sglang_sampling

VARIANTS: dict[str, dict[str, Any]] = {
    "prefix cache": {"disable_radix_cache": False},
    "prefix cache and kept states": {"disable_radix_cache": False, "mamba_track_interval": 256},
}
"""SGLang's arguments of a second pool beside the pool as it is."""

_WHOLE = "raw SGLang"
_SHORT = 4  # the long length over the short one
_ANSWER_SECONDS = 600.0
_PREFILL_SECONDS = 0.5
_STACKS = 150
_STACKS_EVERY_SECONDS = 0.01
_SHOWN = 12
_LOOP = "event_loop_"
_WRAPPERS = ("wrapper", "decorate_context")


@dataclass(frozen=True)
class Contender:
    """generate: answers `requests` prompts with so many tokens each, and tells how many it counted."""

    name: str
    generate: Callable[[int], int]


@dataclass(frozen=True)
class AblationSizes:
    """tokens: the long length. concurrency: so many of the requests at a time. brief: raw SGLang and pools alone,
    without what lies between. profiled_steps: to show by kernels, too, of raw SGLang and the pool; 0 for none."""

    tokens: int
    rounds: int
    concurrency: Sequence[int]
    brief: bool
    profiled_steps: int = 0


@dataclass(frozen=True)
class Fitted:
    """Of one contender: tokens per second at the long length; of the fastest rounds one step, and what a batch costs
    beside its steps."""

    tokens_per_second: tuple[float, ...]
    step_seconds: float
    fixed_seconds: float


def ablate(
    folder: str,
    config: Config,
    requests: Sequence[GenerateRequest],
    sizes: AblationSizes,
    raw_arguments: dict[str, Any],
    variants: Sequence[str],
    places: tuple[Placement, Placement],
) -> None:
    """Prints the tables. variants: keys of `VARIANTS`."""
    raw_place, pool_place = (replace(place, gpus_per_bundle=place.gpus_per_bundle / 4) for place in places)
    with ExitStack() as opened:
        pools = {
            name: opened.enter_context(
                RolloutPool.start(_with(config, arguments), folder, pool_place, log_directory=f"{folder}/{index}")
            )
            for index, (name, arguments) in enumerate([("", {}), *((one, VARIANTS[one]) for one in variants)])
        }
        raw = start_raw(raw_place, folder, raw_arguments)
        ours = None if sizes.brief else start_raw(raw_place, folder, {}, config)
        for pool in pools.values():
            pool.wait_until_ready()
        for count in sizes.concurrency:
            asked = requests[:count]
            contenders = [*_raw_contenders(raw, ours, asked), *_pool_contenders(pools, asked, sizes.brief)]
            measured = _measure(contenders, sizes.tokens, sizes.rounds)
            print(f"\n{count} at a time x {sizes.tokens} tokens, {sizes.rounds} rounds")
            _report({name: _fitted(times, sizes.tokens, count) for name, times in measured.items()})
            _print_stacks("raw SGLang", ray.get(raw.pid.remote()), Path(folder) / "stacks", contenders[0], sizes.tokens)
            for name, pool in pools.items():
                watched = Contender(f"pool {name}".strip(), _through(pool, asked))
                log = Path(pool.serving()[0].setup.log_path)
                _print_stacks(watched.name, pool.worker_pids()[0], log, watched, sizes.tokens)
        if sizes.profiled_steps:
            _profile(raw, pools[""], requests, sizes.profiled_steps, Path(folder))
        ray.get([engine.stop.remote() for engine in (raw, ours) if engine is not None])


def _with(config: Config, sglang: dict[str, Any]) -> Config:
    engine = config.rollout.engine
    wider = engine.model_copy(update={"sglang": engine.sglang | sglang})
    return config.model_copy(update={"rollout": config.rollout.model_copy(update={"engine": wider})})


def _raw_contenders(raw: Any, ours: Any, requests: Sequence[GenerateRequest]) -> list[Contender]:
    prompts = [list(request.prompt_ids) for request in requests]

    def plain(tokens: int) -> dict[str, Any]:
        return {"max_new_tokens": tokens, "temperature": 1.0, "ignore_eos": True}

    def seeded(tokens: int) -> list[dict[str, Any]]:
        return [sglang_sampling(replace(request.sampling, max_new_tokens=tokens), request.seed) for request in requests]

    def asked(engine: Any, sampling: Callable[[int], Any], **how: bool) -> Callable[[int], int]:
        return lambda tokens: ray.get(engine.generate.remote(prompts, sampling(tokens), **how))

    whole = Contender(_WHOLE, asked(raw, plain))
    if ours is None:
        return [whole]
    return [
        whole,
        Contender("raw, no log-probabilities", asked(raw, plain, logprobs=False)),
        Contender("raw, our sampling parameters", asked(raw, seeded)),
        Contender("raw, request by request", asked(raw, seeded, one_by_one=True)),
        Contender("raw, our arguments", asked(ours, plain)),
    ]


def _pool_contenders(
    pools: dict[str, RolloutPool], requests: Sequence[GenerateRequest], brief: bool
) -> list[Contender]:
    found = []
    for name, pool in pools.items():
        if not name and not brief:
            found.append(Contender("our engine, no Ray", _inside(pool.serving()[0], requests)))
        found.append(Contender(f"pool, {name}" if name else "RolloutPool", _through(pool, requests)))
    return found


def _through(pool: RolloutPool, requests: Sequence[GenerateRequest]) -> Callable[[int], int]:
    return lambda tokens: through_pool(pool, _limited(requests, tokens))


def through_pool(pool: RolloutPool, requests: Sequence[GenerateRequest]) -> int:
    """Response tokens of all answers of a pool's client."""
    client = pool.client()

    async def all_answers() -> int:
        return sum(len(one.token_ids) for one in await asyncio.gather(*map(client.generate, requests)))

    try:
        return asyncio.run(asyncio.wait_for(all_answers(), _ANSWER_SECONDS))
    finally:
        client.close()


def _inside(engine: RunningEngine, requests: Sequence[GenerateRequest]) -> Callable[[int], int]:
    """The engine's own method, called in its process: only the requests and a number travel."""

    async def all_answers(served: Any, wanted: list[GenerateRequest]) -> int:
        return sum([len(one.token_ids) async for answers in served.generate(wanted) for one in answers])

    return lambda tokens: int(in_engine(engine, all_answers, _limited(requests, tokens)))


def _limited(requests: Sequence[GenerateRequest], tokens: int) -> list[GenerateRequest]:
    return [replace(one, sampling=replace(one.sampling, max_new_tokens=tokens)) for one in requests]


def _measure(contenders: Sequence[Contender], tokens: int, rounds: int) -> dict[str, dict[int, list[float]]]:
    """Seconds of each contender by length, in turns; the first turn, at the short length, warms all up."""
    short = max(1, tokens // _SHORT)
    seconds: dict[str, dict[int, list[float]]] = {one.name: {short: [], tokens: []} for one in contenders}
    for turn in range(rounds + 1):
        for one in contenders:
            for length in (short, tokens) if turn else (short,):
                begin = time.perf_counter()
                counted = one.generate(length)
                if turn:
                    seconds[one.name][length].append(time.perf_counter() - begin)
                if counted % length:
                    raise SystemExit(f"{one.name}: {counted} tokens, which are no multiple of {length}")
    return seconds


def _fitted(times: dict[int, list[float]], tokens: int, requests: int) -> Fitted:
    short = min(times)
    step = (min(times[tokens]) - min(times[short])) / (tokens - short)
    rates = tuple(requests * tokens / seconds for seconds in times[tokens])
    return Fitted(rates, step, min(times[tokens]) - tokens * step)


def _report(fitted: dict[str, Fitted]) -> None:
    """Beside medians the fastest rounds: what else a machine does only ever slows it."""
    print(
        f"{'':36}{'tokens per second':>30}{'of raw':>9}{'fastest':>10}{'of raw':>9}{'ms a step':>11}{'ms a batch':>12}"
    )
    whole = fitted[_WHOLE].tokens_per_second
    for name, one in fitted.items():
        rates = one.tokens_per_second
        shown = f"{statistics.median(rates):,.0f} ({min(rates):,.0f} to {max(rates):,.0f})"
        shares = (statistics.median(rates) / statistics.median(whole), max(rates) / max(whole))
        times = f"{one.step_seconds * 1e3:>11.3f}{one.fixed_seconds * 1e3:>12.0f}"
        print(f"{name:36}{shown:>30}{shares[0]:>9.1%}{max(rates):>10,.0f}{shares[1]:>9.1%}{times}", flush=True)


def _profile(raw: Any, pool: RolloutPool, requests: Sequence[GenerateRequest], steps: int, folder: Path) -> None:
    traces = {name: folder / name for name in ("raw", "pool")}
    traces["raw"].mkdir()
    ray.get(raw.start_profile.remote(str(traces["raw"]), steps))
    _raw_contenders(raw, None, requests)[0].generate(2 * steps)
    begin_trace(pool.serving()[0], traces["pool"], steps)
    _through(pool, requests)(2 * steps)
    for name, trace in traces.items():
        print(f"{name}: ", end="")
        print_trace(trace, steps)


def _print_stacks(name: str, engine: int, file: Path, contender: Contender, tokens: int) -> None:
    """Where the main thread of the scheduler is while it decodes, which writes its stacks into `file` at a signal.

    engine: the process id of the scheduler's parent.
    """
    children = psutil.Process(engine).children(recursive=True)
    scheduler = next(child for child in children if "scheduler" in child.name())
    before = file.stat().st_size
    with ThreadPoolExecutor(1) as beside:
        answered = beside.submit(contender.generate, tokens)
        time.sleep(_PREFILL_SECONDS)
        for _ in range(_STACKS):
            if answered.done():
                break
            scheduler.send_signal(signal.SIGUSR1)
            time.sleep(_STACKS_EVERY_SECONDS)
        answered.result()
    places, within = _loop_frames(file.read_text(errors="replace")[before:])
    print(f"{name}: {sum(places.values())} looks at its scheduler while it decodes")
    for found in (places, within):
        for frame, count in found.most_common(_SHOWN):
            print(f"  {count / max(1, sum(found.values())):6.1%}  {frame}")
        print(flush=True)


def _loop_frames(dump: str) -> tuple[Counter[str], Counter[str]]:
    """What the scheduler's loop had called, and the innermost frames with the one around them."""
    places: Counter[str] = Counter()
    within: Counter[str] = Counter()
    for thread in re.split(r"\n\s*\n|(?=^(?:Current thread|Thread) 0x)", dump, flags=re.M):
        frames = re.findall(r'File "([^"]*)", line (\d+) in (\S+)', thread)
        loop = next((place for place, (_, _, function) in enumerate(frames) if function.startswith(_LOOP)), None)
        if loop is not None:
            called = [function for _, _, function in frames[:loop] if function not in _WRAPPERS]
            places[called[-1] if called else "the loop itself"] += 1
            within[" < ".join(f"{function} ({Path(file).name}:{line})" for file, line, function in frames[:2])] += 1
    return places, within
