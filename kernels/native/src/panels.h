// Which panels this library's instruction set multiplies with.
#pragma once

#include "isa/amx_twin.h"
#include "tile_panels.h"
#include "vector_panels.h"

namespace rootlace {
namespace detail {

template <class T>
struct PanelsOf {
  using Type = VectorPanels<T>;
};
#if defined(ROOTLACE_TWIN)
template <>
struct PanelsOf<bf16> {
  using Type = TilePanels<TwinTiles>;
};
#elif defined(__AMX_BF16__)
template <>
struct PanelsOf<bf16> {
  using Type = TilePanels<AmxTiles>;
};
#endif

}  // namespace detail

template <class T>
using Panels = typename detail::PanelsOf<T>::Type;

}  // namespace rootlace
