// Choice of attention's products by this library's instruction set.
#pragma once

#include <type_traits>

#include "attention_tiles.h"
#include "attention_vectors.h"
#include "isa/isa.h"

namespace rootlace {

template <class T>
using ProductsOf = std::conditional_t<std::is_same_v<T, bf16> && HAS_TILES, TileProducts<TileUnit>,
                                      VectorProducts<T>>;

}  // namespace rootlace
