// Functions that a process calls before computing, and for the reason of a failed call.
#include "api.h"
#include "guard.h"
#include "isa/isa.h"

extern "C" int32_t rl_prepare() {
  using namespace rootlace;
  return HAS_TILES ? TileUnit::request() : 0;
}

extern "C" const char* rl_error() { return rootlace::error_words; }

extern "C" const char* rl_instructions() { return rootlace::INSTRUCTIONS; }
