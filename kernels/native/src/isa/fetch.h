// Fetching a cache line that will be written.
#pragma once

namespace rootlace {

// Into the first level, for this core alone. Stores happen in order: one that misses its line
// waits for it, and all behind it wait, too. GCC makes an ordinary prefetch of its builtin
// unless it is told of PREFETCHW, which every x86-64 processor of Intel and AMD takes, if only as
// an instruction that does nothing.
inline void fetch_to_write(const void* line) {
#if defined(__x86_64__)
  asm volatile("prefetchw %0" ::"m"(*static_cast<const char*>(line)));
#else
  __builtin_prefetch(line, 1, 3);
#endif
}

}  // namespace rootlace
