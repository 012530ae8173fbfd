// Choice of panels by this library's instruction set.
#pragma once

#include <type_traits>

#include "api.h"
#include "isa/isa.h"
#include "tile_panels.h"
#include "vector_panels.h"

namespace rootlace {

template <class T>
using Panels = std::conditional_t<std::is_same_v<T, bf16> && HAS_TILES, TilePanels<TileUnit>,
                                  VectorPanels<T>>;

}  // namespace rootlace
