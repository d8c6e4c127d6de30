// A real `torch.OutOfMemoryError`, thrown from a library that knows no header of torch.
//
// torch makes it of a `c10::OutOfMemoryError` that reaches its Python bindings. In: the text. Out: that exception, built
// by torch's own constructor, found among the libraries that the process has loaded.
// What is relied on, the same in torch 2.11 to 2.15: `c10::Error(SourceLocation, std::string)`, where SourceLocation is
// two pointers and a 32-bit number; `OutOfMemoryError` adds nothing to its base but its type; the first slot of its table
// of virtual functions is the destructor that leaves the memory alone, as the C++ ABI has it for a class whose base
// declares its destructor first. The object is at most `room` bytes.
// Guarantee: nothing is built before `torch_errors()` found all of it and the caller vouched for the version of torch.
#pragma once

#include <string>

namespace mg {

constexpr unsigned long torch_error_room = 1024;

// Finds what is needed, once; empty: it is all there, else what is missing. From now on `throw_out_of_memory` uses it.
std::string torch_errors();

// Throws `c10::OutOfMemoryError` where `torch_errors` found it, else `std::bad_alloc` with the text.
[[noreturn]] void throw_out_of_memory(const std::string& text);

}  // namespace mg
