"""The allocator with its rules broken, one at a time, to see that the stress programs notice.

The sources know nothing of this: a copy of them is edited and built once, and each stress program there takes the
number of the rule that is to be broken (`--mutant N`, `allocator_ext/stress/mutant.h`).  An edit names a file, a piece
of it that occurs there exactly once, and what stands in its place; `MUTANT` in that is "this rule is broken".
Where the core has been changed so that a piece is no longer found, `copied` says which: put the edit right there.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.allocator.extension import SOURCE

Edit = tuple[str, str, str]


@dataclass(frozen=True)
class Mutant:
    says: str  # what the broken allocator does
    edits: tuple[Edit, ...]


MUTANTS = {
    1: Mutant(
        "record_stream is not heard",
        (
            (
                "core/lifetimes.cc",
                "block->users.end(), block->stream), block->users.end());\n  if (!watched)",
                "block->users.end(), block->stream), block->users.end());\n"
                "  if (MUTANT) block->users.clear();\n  if (!watched)",
            ),
        ),
    ),
    2: Mutant(
        "one marker that precedes is taken for all",
        (
            ("core/capture_graph.cc", "missing--;", "missing = MUTANT ? 0 : missing - 1;"),
            (
                "core/capture_graph.cc",
                "      view->watched[marker].push_back({&deferred, index});\n    }\n",
                "      view->watched[marker].push_back({&deferred, index});\n    }\n"
                "    if (MUTANT && deferred.candidates[index].missing < deferred.markers.size()) {\n"
                "      deferred.candidates[index].missing = 0;\n    }\n",
            ),
        ),
    ),
    3: Mutant(
        "a stream outside of the capture is taken for one without terminals",
        (
            (
                "core/lifetimes.cc",
                "if (found == capture.views.end() || !found->second->known) return false;",
                "if (found == capture.views.end() || !found->second->known) {\n"
                "      if (MUTANT) continue;\n      return false;\n    }",
            ),
            (
                "core/lifetimes.cc",
                "    Observation seen = captures.observe(user, ready);\n    if (seen.view == nullptr ||",
                "    if (MUTANT) continue;\n"
                "    Observation seen = captures.observe(user, ready);\n    if (seen.view == nullptr ||",
            ),
        ),
    ),
    4: Mutant(
        "replaced dependencies are not noticed",
        (
            (
                "core/capture_graph.cc",
                "  for (Node old : view.terminals) {\n    if (std::find(met",
                "  for (Node old : view.terminals) {\n    if (MUTANT) break;\n    if (std::find(met",
            ),
        ),
    ),
    5: Mutant(
        "programmatic edges prove completion",
        (("core/capture_graph.h", "return edge.full();", "return edge.full() || MUTANT;"),),
    ),
    6: Mutant(
        "a block from before the capture counts as allocated in it",
        (
            (
                "core/lifetimes.cc",
                "if (block->capture != capture.serial) {",
                "if (block->capture != capture.serial && !MUTANT) {",
            ),
        ),
    ),
    7: Mutant(
        "what one capture freed is given to another beside it",
        (
            (
                "core/search.cc",
                "block = find_covered(request, kind);\n",
                "block = find_covered(request, kind);\n"
                "      if (block == nullptr && MUTANT) {\n"
                "        for (Tag tag = 2; tag < view->order_tag + 64 && block == nullptr; tag++) {\n"
                "          block = request.pool->lists().best(request.size, kind, request.stream, &tag, 1);\n"
                "        }\n      }\n",
            ),
            (
                "core/search.cc",
                "  if (block.tag == settled) {\n    return settled_too_",
                "  if (MUTANT && request_.seen.view != nullptr && block.stream == request_.stream) return true;\n"
                "  if (block.tag == settled) {\n    return settled_too_",
            ),
        ),
    ),
    8: Mutant(
        "another stream takes what was freed after it last waited",
        (
            (
                "core/capture_graph.cc",
                "  uint64_t& covered = view.covers[&other];",
                "  if (MUTANT) return other.point;\n  uint64_t& covered = view.covers[&other];",
            ),
        ),
    ),
    9: Mutant(
        "outside of captures other streams' uses are not waited for",
        (
            (
                "core/lifetimes.cc",
                "  if (block->users.empty()) {\n    give(block, block->stream, settled",
                "  if (block->users.empty() || MUTANT) {\n    give(block, block->stream, settled",
            ),
        ),
    ),
    10: Mutant(
        "what cannot be proven is given back at once",
        (
            (
                "core/lifetimes.cc",
                "  if (!proven) park(block);",
                "  if (proven) return;\n"
                "  if (MUTANT && own.view != nullptr) {\n"
                "    give(block, block->stream, own.view->order_tag, own.view->point, no_markers);\n"
                "    return;\n  }\n  park(block);",
            ),
        ),
    ),
    11: Mutant(
        "a capture that ended before a body of it is taken for one that came before",
        (("core/lifetimes.cc", "!capture.alone ||", "!(capture.alone || MUTANT) ||"),),
    ),
    12: Mutant(
        "memory that came by proof is given back as if one stream alone had used it",
        (
            (
                "core/lifetimes.cc",
                "    if (block->by_proof && own->partial_at",
                "    if (MUTANT) block->by_proof = false;\n    if (block->by_proof && own->partial_at",
            ),
        ),
    ),
    13: Mutant(
        "what was in use outside of captures goes to any stream",
        (("core/lifetimes.cc", "block->used_outside = true;", "block->used_outside = !MUTANT;"),),
    ),
    14: Mutant(
        "a capture takes memory of a pool that others use outside of captures",
        (
            (
                "core/ladder.cc",
                "if (request.seen.status != Observation::outside) return nullptr;",
                "if (request.seen.status != Observation::outside && !MUTANT) return nullptr;",
            ),
        ),
    ),
    15: Mutant(
        "what other streams did with a block of an earlier capture is taken to be over",
        (
            (
                "core/lifetimes.cc",
                "if (!block->users.empty()) return false;",
                "if (!block->users.empty() && !MUTANT) return false;",
            ),
        ),
    ),
    16: Mutant(
        "an owner that has lost its block frees what is there now",
        (
            (
                "core/checkpoint.cc",
                "if (!block->adopted) ghosts_[block->address]++;",
                "if (!block->adopted && !MUTANT) ghosts_[block->address]++;",
            ),
        ),
    ),
    17: Mutant(
        "a pool is restored while a capture uses it",
        (
            (
                "core/checkpoint.cc",
                "  std::string found = obstacle(pool);",
                '  if (MUTANT) return "";\n  std::string found = obstacle(pool);',
            ),
        ),
    ),
    18: Mutant(
        "whoever may have one block of a run is given its neighbour too",
        (
            (
                "core/search.cc",
                "if (block.state != BlockState::free) return false;\n",
                "if (block.state != BlockState::free) return false;\n"
                "  const Block* before = block.previous;\n"
                "  bool first = request_.seen.view == nullptr || before == nullptr;\n"
                "  if (MUTANT && !first && (*this)(*before)) return true;\n",
            ),
        ),
    ),
    19: Mutant(
        "the last piece of a window is taken under whichever condition",
        (
            (
                "core/stitch.cc",
                "  Ends found = request.pool->holes().ends(may);\n  auto plan = choose(found, request.size, fits",
                "  Ends found = request.pool->holes().ends(may);\n"
                "  if (MUTANT) found.heads = request.pool->holes().ends([](const Block&) { return true; }).heads;\n"
                "  auto plan = choose(found, request.size, fits",
            ),
            (
                "core/stitch.cc",
                "  Ends found = request.pool->holes().ends(may);\n"
                "  auto plan = choose(found, request.size, Stitch::grow",
                "  Ends found = request.pool->holes().ends(may);\n"
                "  if (MUTANT) found.heads = request.pool->holes().ends([](const Block&) { return true; }).heads;\n"
                "  auto plan = choose(found, request.size, Stitch::grow",
            ),
        ),
    ),
    20: Mutant(
        "of a window's block only the first piece waits for the streams that used it",
        (
            (
                "core/device.cc",
                "    piece->users = users;",
                "    if (piece == pieces.front() || !MUTANT) piece->users = users;",
            ),
        ),
    ),
    21: Mutant(
        "a window is made where kernels begin early",
        (
            (
                "core/search.cc",
                "if (request.seen.view->partial_at == 0) {",
                "if (request.seen.view->partial_at == 0 || MUTANT) {",
            ),
            (
                "core/search.h",
                "           request.seen.view->partial_at == 0;",
                "           (request.seen.view->partial_at == 0 || MUTANT);",
            ),
        ),
    ),
    22: Mutant(
        "a window is unmapped when its block is freed",
        (
            (
                "core/device.cc",
                "  std::vector<Block*> pieces = pool.close(window);\n",
                "  std::vector<Block*> pieces = pool.close(window);\n  if (MUTANT) supply_.unmap(pool, window);\n",
            ),
        ),
    ),
    23: Mutant(
        "a page is taken for given back while a window maps it",
        (
            (
                "core/supply.cc",
                "if (mapped.windows != 0) continue;",
                "if (mapped.windows != 0 && !MUTANT) continue;",
            ),
            (
                "core/supply.cc",
                "  std::vector<Window*> idle;\n",
                "  std::vector<Window*> idle;\n  if (MUTANT) return;\n",
            ),
        ),
    ),
    24: Mutant(
        "of a window's block only the first piece is taken when a state comes back",
        (
            (
                "core/checkpoint.cc",
                "    pieces.push_back(pool.take_at(",
                "    if (!pieces.empty() && MUTANT) break;\n    pieces.push_back(pool.take_at(",
            ),
        ),
    ),
    25: Mutant(
        "an open scope is taken for a capture that is under way",
        (
            ("core/device.h", "return lifetimes_.quiet();", "return lifetimes_.quiet() && !(scopes_.any() && MUTANT);"),
            (
                "core/waits.cc",
                "if (!lifetimes_.quiet() ||",
                "if (!lifetimes_.quiet() || (scopes_.any() && MUTANT) ||",
            ),
        ),
    ),
    27: Mutant(
        "what graphs use is lent while one of them may be running",
        (
            (
                "core/ladder.cc",
                "if (segment.captured) return waits.for_all();",
                "if (segment.captured) return MUTANT || waits.for_all();",
            ),
        ),
    ),
    28: Mutant(
        "a pool that has lent memory says that it has not",
        (
            (
                "core/device.cc",
                "bytes = pool != nullptr ? pool->lent : 0;",
                "bytes = pool != nullptr && !MUTANT ? pool->lent : 0;",
            ),
        ),
    ),
    29: Mutant(
        "a free looks at a capture that another thread drives",
        (
            (
                "core/capture_graph.cc",
                "bool with_nodes = drives || driven_here(stream);",
                "bool with_nodes = drives || MUTANT || driven_here(stream);",
            ),
            (
                "core/capture_graph.cc",
                "if (told && drives) capture->thread",
                "if (told && (drives || MUTANT)) capture->thread",
            ),
        ),
    ),
    30: Mutant(
        "what another thread has freed waits for the end of the capture",
        (
            (
                "core/lifetimes.cc",
                "!seen.view->capture->queued.empty()) {",
                "!seen.view->capture->queued.empty() && !MUTANT) {",
            ),
        ),
    ),
    31: Mutant(
        "what an earlier capture left is over for one into the same graph",
        (
            (
                "core/capture_graph.cc",
                "view.apart = view.behind < capture.before.size() || capture.within_apart;",
                "view.apart = (view.behind < capture.before.size() || capture.within_apart) && !MUTANT;",
            ),
            (
                "core/search.cc",
                "if (request.seen.status == Observation::unknown) return nullptr;",
                "if (request.seen.status == Observation::unknown && !MUTANT) return nullptr;",
            ),
        ),
    ),
    32: Mutant(
        "a capture is taken for the only one though another has begun before it",
        (("core/capture_graph.cc", "last_id_ + 1 || single_scope_;", "last_id_ + 1 || single_scope_ || MUTANT;"),),
    ),
    33: Mutant(
        "what a stream used that the driver no longer knows never comes back",
        (
            (
                "core/lifetimes.cc",
                "bool Lifetimes::all_is_over() {\n",
                "bool Lifetimes::all_is_over() {\n  if (MUTANT) return false;\n",
            ),
        ),
    ),
    34: Mutant(
        "contents that were kept are not copied back",
        (
            (
                "core/sleep.cc",
                "if (!pool.kept.empty()) copies.from_host",
                "if (!pool.kept.empty() && !MUTANT) copies.from_host",
            ),
        ),
    ),
    35: Mutant(
        "a block is handed out while its pool sleeps",
        (
            (
                "core/device.cc",
                "if (pool.asleep) return {Status::invalid",
                "if (pool.asleep && !MUTANT) return {Status::invalid",
            ),
        ),
    ),
    36: Mutant(
        "a window wakes over another page",
        (
            (
                "core/sleep.cc",
                "mapped = driver_.memory_map(at, page, 0, pool.chunk_at(window->pages[i])->handle",
                "mapped = driver_.memory_map(at, page, 0, pool.chunk_at(window->pages[MUTANT ? 0 : i])->handle",
            ),
        ),
    ),
    37: Mutant(
        "contents come back to another chunk",
        (("core/sleep.cc", "        chunk.kept_at = total;", "        chunk.kept_at = MUTANT ? 0 : total;"),),
    ),
    38: Mutant(
        "a wake that fails loses what was kept",
        (
            (
                "core/sleep.cc",
                "    put_away(pool);\n    bytes = 0;",
                "    put_away(pool);\n    if (MUTANT) host_.give_back(pool.kept);\n    bytes = 0;",
            ),
        ),
    ),
    39: Mutant(
        "a pool sleeps that a capture under way uses",
        (
            (
                "core/sleep.cc",
                'if (!quiet()) return {Status::invalid, "a capture is under way, and',
                'if (!quiet() && !MUTANT) return {Status::invalid, "a capture is under way, and',
            ),
            ("core/sleep.cc", "  if (!waits().for_all()) {\n", "  if (!waits().for_all() && !MUTANT) {\n"),
        ),
    ),
    40: Mutant(
        "free memory that graphs use is not brought back",
        (("core/sleep.cc", "|| !pool.captured) give_back(pool);", "|| !pool.captured || MUTANT) give_back(pool);"),),
    ),
    41: Mutant(
        "copies that have failed are taken for complete",
        (("core/host_memory.cc", "  if (stream_ != nullptr) ok_ =", "  if (stream_ != nullptr && !MUTANT) ok_ ="),),
    ),
    42: Mutant(
        "a page goes while a window still maps it",
        (
            (
                "core/sleep.cc",
                "(window != left.end() && window->second != 0)",
                "(window != left.end() && window->second != 0 && !MUTANT)",
            ),
        ),
    ),
}


def _edits() -> Iterator[Edit]:
    # all of the core sees it, and the stress programs may say which rule is broken
    yield "core/types.h", '#include "driver.h"\n', '#include "driver.h"\n#include "stress/mutant.h"\n'
    yield "stress/mutant.h", "has_mutants = false;", "has_mutants = true;"
    for number, mutant in MUTANTS.items():
        for path, rule, broken in mutant.edits:
            yield path, rule, broken.replace("MUTANT", f"mutated({number})")


def copied(folder: Path) -> Path:
    """A copy of the sources in `folder` in which every rule can be broken."""
    source = folder / "allocator_ext"
    shutil.copytree(SOURCE, source, ignore=shutil.ignore_patterns("build", "*.so", "__pycache__"))
    for path, rule, broken in _edits():
        text = (source / path).read_text()
        assert text.count(rule) == 1, f"{path} has {text.count(rule)} times, and not once:\n{rule}"
        (source / path).write_text(text.replace(rule, broken))
    return source
