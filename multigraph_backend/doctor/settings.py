"""Caches, and the variables of the environment that steer multigraph or stand in its way."""

from __future__ import annotations

import getpass
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from multigraph_backend import redirect
from multigraph_backend.doctor.findings import Finding, Level
from multigraph_backend.environment import entries as environment_entries
from multigraph_backend.options import DISABLE_VARIABLE, VARIABLE, Options, OptionsError, disabled_pieces

# ---------------------------------------------------------------- caches

_MOST_FILES = 100_000  # that are counted for a size
_LITTLE_SPACE = 1 << 30


def cache_switches() -> dict[str, bool]:
    """Which of torch's caches of compiled graphs are on."""
    from multigraph_backend import _compat

    all_off = bool(_compat.inductor_config.force_disable_caches)
    return {
        "FX graph cache": not all_off and bool(_compat.inductor_config.fx_graph_cache),
        "AOTAutograd cache": not all_off and bool(_compat.functorch_config.enable_autograd_cache),
    }


def user_name() -> str | None:
    """The user's name, None for a user without one, as containers have it."""
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):
        return None


def cache_folders(environ: Mapping[str, str]) -> dict[str, Path]:
    """Where Inductor and Triton keep what they compiled; Inductor puts Triton's among its own unless told otherwise."""
    inductor = environ.get("TORCHINDUCTOR_CACHE_DIR")
    if inductor is None:
        user = re.sub(r'[\\/:*?"<>|]', "_", user_name() or f"uid_{os.getuid()}")
        inductor = os.path.join(tempfile.gettempdir(), f"torchinductor_{user}")
    folders = {"Inductor": Path(inductor)}
    if "TRITON_CACHE_DIR" in environ:
        folders["Triton"] = Path(environ["TRITON_CACHE_DIR"])
    return folders


def caches(environ: Mapping[str, str], switches: Mapping[str, bool], user: str | None) -> Iterator[Finding]:
    """Where compiled code is kept between processes, how much of it there is, and what is not kept.

    switches: caches of compiled graphs, by name, and whether each is on; user: the user's name, if there is one
    """
    if user is None and "TORCHINDUCTOR_CACHE_DIR" not in environ:
        said = "this user has no name, from which torch before 2.15 makes the name of Inductor's folder: compiles fail"
        yield Finding("caches", "warning", said, "set TORCHINDUCTOR_CACHE_DIR, or USER")
    variables = {"Inductor": "TORCHINDUCTOR_CACHE_DIR", "Triton": "TRITON_CACHE_DIR"}
    for name, folder in cache_folders(environ).items():
        there = next((place for place in (folder, *folder.absolute().parents) if place.exists()), Path(os.sep))
        size, complete = _size(folder)
        facts = {"folder": _shown(folder), "bytes": size, "complete": complete}
        said = f"{name} keeps {'' if complete else 'more than '}{size / 1e6:.1f} MB in {_shown(folder)}"
        elsewhere = f"set {variables[name]} to a folder that you may write to"
        if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
            yield Finding("caches", "error", f"{said}, which cannot be written to: compiles fail", elsewhere, facts)
        elif (free := shutil.disk_usage(there).free) < _LITTLE_SPACE:
            space = f"make space, or {elsewhere}"
            yield Finding("caches", "warning", f"{said}, where only {free / 1e6:.0f} MB are free", space, facts)
        else:
            yield Finding("caches", "ok", said, facts=facts)
    off = [name for name, on in switches.items() if not on]
    named = [name for name in _CACHE_VARIABLES if name in environ]
    if not off:
        yield Finding("caches", "ok", f"on: {', '.join(switches)}", facts=dict(switches))
        return
    remedy = f"unset {', '.join(named)}" if named else "leave torch's configuration of its caches as it is"
    said = f"off: {', '.join(off)}: each process compiles anew"
    yield Finding("caches", "warning", said, remedy, dict(switches))


def warm_start(environ: Mapping[str, str]) -> Iterator[Finding]:
    """What earlier processes have noted for later ones, and what of it is not to be trusted."""
    from multigraph_backend.cache import manifests, trusted  # they load torch

    if environ.get(manifests.VARIABLE) == "":
        yield Finding("warm start", "ok", f"{manifests.VARIABLE} is empty: nothing is noted, and nothing loaded ahead")
        return
    named = environ.get(manifests.VARIABLE)
    place = Path(named) if named else cache_folders(environ)["Inductor"] / manifests.name()
    try:
        found = manifests.find(place)
    except (OSError, trusted.Refused) as problem:
        said = f"nothing is noted or loaded ahead, for {_shown(place)} cannot be used: {problem}"
        elsewhere = f"make it a folder of yours that nobody else may write to, or name one in {manifests.VARIABLE}"
        yield Finding("warm start", "warning", said, elsewhere)
        return
    used = sum(len(entry.used) for entry in found.manifests)
    facts = {"folder": _shown(place), "manifests": len(found.manifests), "used": used, "bytes": found.nbytes}
    facts.update(refused=len(found.refused), others=found.others)
    others = f", {found.others} of other versions" if found.others else ""
    said = f"{len(found.manifests)} graphs with {used} variants are noted in {_shown(place)}{others}"
    yield Finding("warm start", "ok", said, facts=facts)
    for name, reason in found.refused:
        anew = "remove it; it is not used, and written anew"
        yield Finding("warm start", "warning", f"manifest {name} is refused: {reason}", anew)


_CACHE_VARIABLES = (
    "TORCHINDUCTOR_FORCE_DISABLE_CACHES",
    "TORCH_COMPILE_FORCE_DISABLE_CACHES",
    "TORCHINDUCTOR_FX_GRAPH_CACHE",
    "TORCHINDUCTOR_FX_GRAPH_CACHE_DEFAULT",
    "TORCHINDUCTOR_AUTOGRAD_CACHE",
)


def _size(folder: Path) -> tuple[int, bool]:
    """Bytes of the files in a folder, and whether all of them were counted."""
    total = files = 0
    for place, _, names in os.walk(folder):
        for name in names:
            files += 1
            if files > _MOST_FILES:
                return total, False
            try:
                total += os.lstat(os.path.join(place, name)).st_size
            except OSError:  # gone meanwhile
                continue
    return total, True


def _shown(path: Path) -> str:
    """A path as it may be shown to others: the home folder is `~`."""
    home = os.path.expanduser("~")
    text = str(path)
    return "~" + text[len(home) :] if len(home) > 1 and (text == home or text.startswith(home + os.sep)) else text


# ---------------------------------------------------------------- the environment


@dataclass(frozen=True)
class Switch:
    """A variable of torch's own: whether a value of it turns something off, and what is lost then."""

    variable: str
    off: Callable[[str], bool]
    level: Level
    text: str


def _names_others(rules: str) -> bool:
    return bool(rules) and not redirect.in_force({redirect.OVERRIDE: rules})


SWITCHES = (
    Switch("TORCH_COMPILE_DISABLE", "1".__eq__, "error", "torch.compile compiles nothing: everything runs eagerly"),
    Switch("TORCHDYNAMO_DISABLE", "1".__eq__, "error", "torch.compile compiles nothing: everything runs eagerly"),
    Switch(redirect.OVERRIDE, _names_others, "warning", "graphs that it names go to another backend"),
    # any text at all turns it on, "0" too
    Switch("TORCHDYNAMO_SUPPRESS_ERRORS", bool, "warning", "what fails to compile runs eagerly without a word"),
    Switch(
        "TORCH_DYNAMO_AUTOMATIC_DYNAMIC_SHAPES",
        "1".__ne__,
        "warning",
        "sizes become dynamic only with dynamic=True or a mark, and constants have no variants",
    ),
)


def switches_in_force(environ: Mapping[str, str]) -> list[Finding]:
    """Variables of torch's own that keep multigraph from its work."""
    return [
        Finding(
            "environment", row.level, f"{row.variable}={environ[row.variable]}: {row.text}", f"unset {row.variable}"
        )
        for row in SWITCHES
        if row.variable in environ and row.off(environ[row.variable])
    ]


_LOST_WITHOUT = {
    "all": "multigraph compiles each graph at once, as any backend would",
    "cudagraphs": "nothing is recorded",
    "kernels_together": "each C++ kernel is compiled by itself",
    "native_calls": "what is recorded is called by way of Python",
    "padding": "no call is padded",
    "patched_inputs": "inputs that come at another address at each call are copied into recordings",
    "stored_code": "saved functions load all of Inductor before they take their code from torch's caches",
    "saved_tensors": "nothing is packed",
    "variants": "every call runs the generic graph",
}


def environment(environ: Mapping[str, str]) -> Iterator[Finding]:
    """multigraph's own variables, read as a compile would read them, and torch's that stand in its way."""
    yield from _declared_options(environ)
    try:
        pieces = sorted(disabled_pieces(environ))
    except OptionsError as error:
        yield Finding("environment", "error", str(error), f"unset {DISABLE_VARIABLE}, or name one of the pieces")
    else:
        if pieces:
            lost = "; ".join(_LOST_WITHOUT[piece] for piece in (["all"] if "all" in pieces else pieces))
            said = f"{DISABLE_VARIABLE} turns off {', '.join(pieces)}: {lost}"
            yield Finding("environment", "warning", said, f"unset {DISABLE_VARIABLE}", {"disabled": pieces})
        else:
            yield Finding("environment", "ok", f"{DISABLE_VARIABLE} turns nothing off")
    if redirect.in_force(environ):
        rules = environ[redirect.OVERRIDE]
        said = f"{redirect.OVERRIDE}={rules}: what asks for Inductor is compiled by multigraph"
        yield Finding("environment", "ok", said, facts={"redirected": rules})
    switches = switches_in_force(environ)
    yield from switches
    if not switches:
        yield Finding("environment", "ok", "no variable of torch's stands in the way")


def _declared_options(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Each entry of MULTIGRAPH_OPTIONS, merged with the others as for a model of that very name."""
    if not environ.get(VARIABLE, "").strip():
        yield Finding("environment", "ok", f"{VARIABLE} is not set")
        return
    problems: list[str] = []
    names: list[str] = []
    shown: list[str] = []
    notes: list[str] = []
    what = VARIABLE
    try:
        found = environment_entries(environ)
        assert found is not None
        names = list(found.options)
        what = VARIABLE if found.file is None else f"{VARIABLE} ({_shown(Path(found.file))})"
        Options.build(environ=environ)
    except OptionsError as error:
        problems.append(str(error))
    remedy = f"mend {what}; as it is, each torch.compile with multigraph that it applies to raises this error"
    for name in names:
        try:
            built = Options.build(model_names=(name,), environ=environ)
        except OptionsError as error:
            problems.append(str(error))
            continue
        shown.append(f"{name!r} ({len(built.specialize)} variants)")
        notes += [f"{what}, {name!r}: {note}" for note in built.notes]
    for problem in dict.fromkeys(problems):
        yield Finding("environment", "error", problem, remedy)
    for note in notes:
        yield Finding("environment", "warning", note, "take that option away, or the compiler")
    if not problems:
        said = f"{what} is right: {', '.join(shown) or 'no entries'}"
        yield Finding("environment", "ok", said, facts={"names": names})
