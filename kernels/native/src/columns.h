// Numbers per row that Python hands over by name. A source lists them once, as
//   #define PARAMS(EACH) EACH(double, temperature) EACH(int32_t, top_k)
// `struct Params { PARAMS(RL_FIELD) };` holds the numbers of one row, `PARAMS(RL_NAME)` is the text
// for Python, and `Params{PARAMS(RL_NUMBER)}` reads the numbers of `row` from `columns`.
#pragma once

#include <cstring>

#include "api.h"

#define RL_FIELD(type, name) type name;
#define RL_NAME(type, name) #type " " #name ","
#define RL_NUMBER(type, name) number<type>(*columns++, row),

namespace rootlace {

template <class T>
T number(const RlColumn& column, int row) {
  T found;
  std::memcpy(&found, static_cast<const char*>(column.first) + row * column.apart, sizeof found);
  return found;
}

}  // namespace rootlace
