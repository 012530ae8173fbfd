"""Pictures of results (needs the extra `bench`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def figure_of(path: Path, *grid: int, **options: Any) -> Iterator[tuple[Any, Any]]:
    """Yield `pyplot.subplots(*grid, **options)`; write the figure to `path` at the end."""
    try:
        import matplotlib
    except ImportError as error:
        raise SystemExit("--plot needs matplotlib: pip install 'rootlace[bench]'") from error
    matplotlib.use("svg" if path.suffix == ".svg" else "agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(*grid, layout="constrained", **options)
    yield figure, axes
    for one in figure.axes:
        one.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
    pyplot.close(figure)


def grouped_bars(
    axes: Any,
    series: Mapping[str, Sequence[float | None]],
    groups: Sequence[str],
    form: str | Callable[[float], str],
) -> None:
    """Draw bars of each series side by side in each group; None has no bar."""
    width = 0.84 / max(len(series), 1)
    for place, (label, heights) in enumerate(series.items()):
        shift = (place - (len(series) - 1) / 2) * width
        known = {index + shift: height for index, height in enumerate(heights) if height}
        bars = axes.bar(list(known), list(known.values()), width * 0.92, label=label)
        axes.bar_label(bars, fmt=form, fontsize=6)
    axes.set_xticks(range(len(groups)), groups)
    axes.tick_params(axis="x", labelsize=8)
    axes.legend(frameon=False, fontsize=8)


def ratio_bars(axes: Any, series: Mapping[str, Sequence[float | None]], groups: list[str]) -> None:
    """Draw bars, and a thin line at a ratio of 1."""
    grouped_bars(axes, series, groups, "%.2f")
    axes.axhline(1.0, color="0.4", linewidth=0.8)


def plot_speed_ups(results: list[dict[str, Any]], path: Path) -> None:
    """Draw a bar per load and model: requests per second with the cache over without."""
    rates = {(r["size"], r["load"], r["cache"]): r["requests_per_second"] for r in results}
    loads = list(dict.fromkeys(r["load"] for r in results))
    series: dict[str, list[float | None]] = {
        f"model {size}": [rates[size, load, True] / rates[size, load, False] for load in loads]
        for size in sorted({size for size, _, _ in rates})
    }
    with figure_of(path, figsize=(7, 3.2)) as (_, axes):
        ratio_bars(axes, series, loads)
        axes.set_ylabel("requests/s, cache on over off")


def plot_constrained(
    engines: dict[str, dict[str, Any]], serving: list[dict[str, Any]], path: Path
) -> None:
    """Draw mask times per engine on the left, served requests over unconstrained on the right."""
    known = {name: found["kinds"] for name, found in engines.items() if "kinds" in found}
    columns = {"p50": "mask_p50_us", "p99": "mask_p99_us", "first visit, p99": "mask_first_p99_us"}
    labels = {"constrained / unconstrained": "no jump", "jump / unconstrained": "jump"}
    with figure_of(path, 1, 2, figsize=(9, 3.4), width_ratios=(1, 1.2)) as (_, (masks, served)):
        grouped_bars(
            masks,
            {
                label: [kinds["regex"][column] for kinds in known.values()]
                for label, column in columns.items()
            },
            [name.replace(" (", "\n(") for name in known],
            lambda value: f"{value:.1f}" if value < 1000 else f"{value / 1000:.0f}k",
        )
        masks.set_yscale("log")
        masks.set_ylabel("mask of a state, microseconds")
        masks.set_title("20 regular expressions", fontsize=10)
        ratio_bars(
            served,
            {label: [found["ratios"][key] for found in serving] for key, label in labels.items()},
            [f"{found['load']}\n{found['concurrency']} at a time" for found in serving],
        )
        served.set_ylabel("requests/s over unconstrained")
        served.set_title("JSON extraction, served", fontsize=10)


def plot_peers(result: Mapping[str, Any], targets: Mapping[str, float], path: Path) -> None:
    """Draw the best peer's wall times over ours (left), mean times to the first token (right).

    A short line on each group of the left marks the target.
    """
    sizes = {"a": "15M parameters", "b": "150M parameters"}
    peers = sorted({row["engine"] for row in result["rows"]} - {"rootlace", "rootlace programs"})
    names = list(dict.fromkeys(name for found in result["ratios"].values() for name in found))
    titles = [result["workloads"][name].partition(":")[0].replace(" ", "\n") for name in names]
    with figure_of(path, 1, 2, figsize=(9, 3.2)) as (_, (speed, first)):
        for axes, ratios in ((speed, result["ratios"]), (first, result["ttft_ratios"])):
            series = {
                sizes.get(model, model): [found.get(name) for name in names]
                for model, found in ratios.items()
            }
            ratio_bars(axes, series, titles)
        for place, name in enumerate(names):
            bound = targets[name]
            speed.plot([place - 0.45, place + 0.45], [bound, bound], color="0.2", linewidth=1.2)
        speed.set_ylabel("wall time, best peer / ours")
        first.set_ylabel("time to first token, best peer / ours")
        speed.set_title(f"peers: {', '.join(peers)}; lines: targets", fontsize=9)


def plot_rates(rates: list[dict[str, Any]], path: Path) -> None:
    """Draw a panel per load: requests per second of a replica by replicas, for each router."""
    loads = list(dict.fromkeys(rate["load"] for rate in rates))
    size = (3.2 * len(loads), 3.2)
    with figure_of(path, 1, len(loads), figsize=size, squeeze=False) as (_, grid):
        for axes, load in zip(grid[0], loads, strict=True):
            for router in dict.fromkeys(rate["router"] for rate in rates):
                found = [r for r in rates if (r["load"], r["router"]) == (load, router)]
                counts = [rate["replicas"] for rate in found]
                each = [rate["requests_per_second"] / rate["replicas"] for rate in found]
                bound = router == "bound"
                axes.plot(
                    *(counts, each, "--" if bound else "o-"),
                    color="0.5" if bound else None,
                    markersize=4,
                    label=router,
                )
            axes.set_xscale("log")
            axes.set_xticks(counts, [str(count) for count in counts])
            axes.minorticks_off()
            axes.set_ylim(bottom=0)
            axes.set_xlabel("replicas")
            axes.set_title(load, fontsize=10)
        grid[0][0].set_ylabel("requests/s of a replica")
        grid[0][-1].legend(frameon=False, fontsize=8)
