// Which rule of the core is broken in this run, for tests that have to notice it.
//
// In the sources no rule can be broken, and nothing but the stress programs includes this file. The tests build a copy of
// the sources in which places of the core ask `mutated(number)`; tests/support/allocator/mutants.py lists the numbers and the
// edits, and makes that copy.
#pragma once

namespace mg {

constexpr bool has_mutants = false;

inline int mutant = 0;  // set before the first allocator is made; 0: none

inline bool mutated(int number) { return mutant == number; }

}  // namespace mg
