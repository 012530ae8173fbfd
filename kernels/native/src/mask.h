// Masks of tokens: bit i of word w says whether token MASK_WORD * w + i is allowed.
#pragma once

#include <cstdint>

namespace rootlace {

constexpr int MASK_WORD = 32;  // tokens per word

inline const int32_t* mask_at(int64_t address) {
  return reinterpret_cast<const int32_t*>(static_cast<intptr_t>(address));
}

// Bit i says whether `token` + i is allowed; no further than the token's word goes.
inline uint32_t bits_from(const int32_t* mask, int token) {
  return static_cast<uint32_t>(mask[token / MASK_WORD]) >> token % MASK_WORD;
}

}  // namespace rootlace
