// Bytes as people read them.
#pragma once

#include <cstdio>
#include <string>

namespace mg {

inline std::string readable(size_t bytes) {
  const char* units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  double amount = static_cast<double>(bytes);
  int unit = 0;
  for (; amount >= 1024 && unit < 4; unit++) amount /= 1024;
  char text[48];
  snprintf(text, sizeof text, unit == 0 ? "%.0f %s" : "%.2f %s", amount, units[unit]);
  return text;
}

}  // namespace mg
