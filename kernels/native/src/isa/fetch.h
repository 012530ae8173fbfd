// Fetching a cache line that will be written.
#pragma once

namespace rootlace {

// Fetches a line to the first level of cache, for this core alone. Stores happen in order, so a store that misses its
// line delays all later stores. GCC makes an ordinary prefetch of its builtin unless PREFETCHW is enabled. Every
// x86-64 processor of Intel and AMD accepts PREFETCHW, if only as a no-op.
inline void fetch_to_write(const void* line) {
#if defined(__x86_64__)
  asm volatile("prefetchw %0" ::"m"(*static_cast<const char*>(line)));
#else
  __builtin_prefetch(line, 1, 3);
#endif
}

}  // namespace rootlace
