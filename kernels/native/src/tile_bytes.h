// Unpacking of eight-bit codes for a tile unit, tile by tile in the order of memory.
#pragma once

#include <cstddef>

#include "codes.h"

namespace rootlace {

namespace detail {

template <int CODES, bool OFFSETS>
void unpack_tiles(Groups* groups, int vecs, int steps, bf16* to, size_t stride) {
  using Unpacker = detail::Unpacker<bf16, CODES, OFFSETS>;
  constexpr int AHEAD = 1536;  // bytes by which codes are fetched ahead, to the first level of cache
  constexpr size_t CODES_OF_CHUNK = CHUNK * LANES;
  const CodeLayout& layout = groups->layout();
  Unpacker unpackers[] = {layout, layout};
  for (int step = 0; step < steps; step++, to += stride)
    for (int vec = 0; vec < vecs; vec++) {
      Groups& own = groups[vec];
      const char* codes = own.codes();
      bf16* tile = to + vec * 2 * CODES_OF_CHUNK;
      for (size_t i = 0; i < 2 * CODES_OF_CHUNK; i += 64) __builtin_prefetch(codes + AHEAD + i, 0, 3);
      for (size_t half = 0; half < 2 * CODES_OF_CHUNK; half += CODES_OF_CHUNK) {
        if (own.begins()) own.fetch_scales(AHEAD);
        if (own.begins() || (!step && !half)) unpackers[vec].begin(own);
        unpackers[vec].chunk(codes + half, tile + half, 2 * LANES);
        own.skip(1);
      }
    }
}

}  // namespace detail

// Unpacks the next `steps` tiles of one vector or two. A step's tiles are contiguous; steps are `stride` numbers
// apart.
inline void unpack_tiles(Groups* groups, int vecs, int steps, bf16* to, size_t stride) {
  const RlScheme& scheme = groups->layout().scheme;
  const bool offsets = scheme.offsets != RL_NO_NUMBERS;
  if (scheme.codes == RL_INT8)
    (offsets ? detail::unpack_tiles<RL_INT8, true> : detail::unpack_tiles<RL_INT8, false>)(
        groups, vecs, steps, to, stride);
  else
    (offsets ? detail::unpack_tiles<RL_E4M3, true> : detail::unpack_tiles<RL_E4M3, false>)(
        groups, vecs, steps, to, stride);
}

}  // namespace rootlace
