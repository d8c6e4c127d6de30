#include "core/windows.h"

namespace mg {

Window& Windows::add(Address address, size_t size) {
  auto window = std::make_unique<Window>();
  window->address = address;
  window->size = size;
  window->serial = ++last_;
  window->pages.reserve(size / size_class::page);
  return *(windows_[address] = std::move(window));
}

void Windows::add_page(Window& window, Address home, Chunk& chunk) {
  window.pages.push_back(home);
  chunk.windows++;
  pages_++;
}

void Windows::remove_page(Window& window, Chunk* chunk) {
  if (chunk != nullptr) chunk->windows--;
  window.pages.pop_back();
  if (!window.away.empty()) window.away.pop_back();
  pages_--;
}

Window* Windows::find(uint64_t serial) const {
  for (auto& [address, window] : windows_) {
    if (window->serial == serial) return window->whole() ? window.get() : nullptr;
  }
  return nullptr;
}

}  // namespace mg
