"""The picture: bandwidth over size on the left, tensor lists and training steps on the right."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from .cases import PEER_TITLES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Colours that stay apart for colour-blind eyes and in grey.
COLOURS = {"fusewire": "#d1495b", "gloo": "#00798c", "mpi": "#edae49", "memcpy": "#8d96a3", "ddp": "#00798c"}
MARKERS = {"fusewire": "o", "gloo": "s", "mpi": "^", "memcpy": ""}
SHORT_TITLES = {
    "list-resnet50": "ResNet-50\n161 tensors, 102 MB",
    "list-gpt2": "GPT-2 small\n148 tensors, 498 MB",
    "list-1000x1000": "1,000 tensors of\n1,000 floats",
    "training-linear200": "200 linear layers",
    "training-transformer": "transformer",
    "training-resnet18": "ResNet-18",
}


def draw(data: dict[str, Any], path: Path) -> None:
    """Draw the run ``data`` (what ``report.as_json`` returns) into ``path``; the suffix gives the format.

    Raises ValueError for a suffix that matplotlib cannot write.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    sections = [
        (section, draw_section)
        for section, draw_section in (("allreduce", _sizes), ("list", _lists), ("training", _training))
        if any(result["section"] == section for result in data["results"])
    ]
    by_section = {s: [r for r in data["results"] if r["section"] == s] for s, _ in sections}
    bars = [s for s, _ in sections if s != "allreduce"]
    with pyplot.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        figure = pyplot.figure(figsize=(13.5, 7.6), layout="constrained")
        left = "allreduce" in by_section
        both = left and bool(bars)
        grid = figure.add_gridspec(max(1, len(bars)), 2 if both else 1, width_ratios=[1, 1.15] if both else [1])
        for section, draw_section in sections:
            place = grid[:, 0] if section == "allreduce" else grid[bars.index(section), 1 if left else 0]
            draw_section(figure.add_subplot(place), by_section[section])
        ranks = data["ranks"]
        figure.suptitle(
            f"Fusewire beside its peers, {ranks} rank{'s' if ranks > 1 else ''} on {data['machine']['cores']} cores of "
            f"{data['machine']['cpu']}, one thread each, medians",
            fontsize=11,
        )
        figure.savefig(path, dpi=130)
        pyplot.close(figure)


def _sizes(axes: Axes, results: list[dict[str, Any]]) -> None:
    results = sorted((r for r in results if r["dtype"] == "float32"), key=lambda r: r["bytes"])
    for peer in ("memcpy", "mpi", "gloo", "fusewire"):
        points = [
            (result["bytes"], contender["gigabytes_per_second"])
            for result in results
            for contender in result["contenders"]
            if contender["peer"] == peer
        ]
        if points:
            style = {"linestyle": "--", "linewidth": 1.6} if peer == "memcpy" else {"linewidth": 2.2, "markersize": 6}
            label = "memcpy by all ranks at once (the limit)" if peer == "memcpy" else PEER_TITLES[peer]
            axes.plot(*zip(*points, strict=True), color=COLOURS[peer], marker=MARKERS[peer], label=label, **style)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    sizes = [result["bytes"] for result in results]
    axes.set_xticks(sizes, [size_name(size) for size in sizes], rotation=45, ha="right", rotation_mode="anchor")
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(lambda value, _: rate_name(value))
    axes.set_xlabel("size of the tensor (float32)")
    axes.set_ylabel("size / time")
    axes.set_title("Allreduce of one tensor: higher is better", loc="left")
    axes.grid(True, color="#e6e6e6")
    axes.set_axisbelow(True)
    axes.legend(loc="lower right", frameon=False)


def _lists(axes: Axes, results: list[dict[str, Any]]) -> None:
    kinds = [
        ("fusewire", "async each", "fusewire, async each", COLOURS["fusewire"]),
        ("fusewire", "grouped", "fusewire, grouped", "#e9a3ad"),
        ("gloo", "25 MB buckets", "Gloo, 25 MB buckets", COLOURS["gloo"]),
        ("mpi", "one by one", "MPI, one by one", COLOURS["mpi"]),
        ("mpi", "packed", "MPI, packed", "#f6d7a0"),
        ("memcpy", "", "memcpy", COLOURS["memcpy"]),
    ]
    _bars(axes, results, kinds, "median")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: number(value))
    axes.set_ylabel("time (ms)")
    axes.set_title("Allreduce of a list of tensors: lower is better", loc="left")


def _training(axes: Axes, results: list[dict[str, Any]]) -> None:
    kinds = [
        ("fusewire", "", "fusewire", COLOURS["fusewire"]),
        ("ddp", "", "DDP (Gloo)", COLOURS["ddp"]),
    ]
    _bars(axes, results, kinds, "extra_median")
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_ylabel("extra time (ms)")
    axes.set_title("Communication added to a training step: lower is better", loc="left")


Kind = tuple[str, str, str, str]  # peer, variant, label, colour


def _bars(axes: Axes, results: list[dict[str, Any]], kinds: list[Kind], field: str) -> None:
    """Grouped bars, one group per result, each with its value on top; training bars carry their interval."""
    groups = [{(c["peer"], c["variant"]): c for c in result["contenders"]} for result in results]
    width = 0.84 / max(1, max(sum((k[0], k[1]) in group for k in kinds) for group in groups))
    drawn: set[str] = set()
    for index, group in enumerate(groups):
        present = [kind for kind in kinds if (kind[0], kind[1]) in group]
        for place, (peer, variant, label, colour) in enumerate(present):
            contender = group[peer, variant]
            height, top = contender[field], contender[field]
            centre = index + (place - (len(present) - 1) / 2) * width
            axes.bar(centre, height, width * 0.92, color=colour, label="_" if label in drawn else label)
            drawn.add(label)
            if field == "extra_median":
                low, top = contender["extra_interval"]
                spread = [[height - low], [top - height]]
                axes.errorbar(centre, height, spread, fmt="none", ecolor="#444444", capsize=3, linewidth=1)
            above: dict[str, Any] = {
                "xytext": (0, 3),
                "textcoords": "offset points",
                "ha": "center",
                "fontsize": 8.5,
            }
            axes.annotate(number(height), (centre, max(0, top)), **above)
    axes.set_xticks(range(len(results)), [SHORT_TITLES.get(r["case"], r["title"]) for r in results])
    axes.margins(y=0.15)
    axes.legend(frameon=False, fontsize=9, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.22))


def number(value: float) -> str:
    """Two digits or the whole milliseconds: short enough to stand above a thin bar."""
    return f"{value:.0f}" if abs(value) >= 9.95 else f"{value:.2g}"


def size_name(nbytes: int) -> str:
    for unit, name in ((1 << 20, "MB"), (1 << 10, "KB")):
        if nbytes >= unit:
            return f"{nbytes / unit:g} {name}"
    return f"{nbytes} B"


def rate_name(gigabytes_per_second: float) -> str:
    for unit, name in ((1.0, "GB/s"), (1e-3, "MB/s"), (1e-6, "KB/s")):
        if gigabytes_per_second >= unit * 0.999:
            return f"{gigabytes_per_second / unit:g} {name}"
    return f"{gigabytes_per_second * 1e9:g} B/s"
