// Additions of LoRA adapters to the products of some rows: (x a^T) b^T, adapter by adapter.
#pragma once

#include <cstdint>
#include <vector>

#include "api.h"
#include "linear.h"
#include "team.h"

namespace rootlace {

// Products of a layer that an adapter may change, in the order of `RlModel.adapters`.
enum class AdaptedPart : int32_t { QKV = 0, OUTPUT, GATE_UP, DOWN, Q_UP, COUNT };

// Rows of an x by adapter. The object is kept from step to step to reuse its memory.
class AdapterGroups {
 public:
  // of_tokens[token]: a token's adapter, -1 for none; null: no token has one. Row i is token
  // `tokens[i]`, or token i if `tokens` is null.
  void find(const int32_t* of_tokens, const int32_t* tokens, int rows);

  struct Group {
    int adapter, begin, end;  // range of `rows`
  };
  std::vector<Group> groups;
  std::vector<int32_t> rows;      // rows with an adapter, by adapter
  std::vector<int32_t> places;    // [rows of x]: index in `rows`; -1: none
  std::vector<int32_t> adapters;  // [rows of x]: the row's adapter; -1: none
};

// Memory for the results of `adapt`, one row for each row with an adapter.
template <class T>
struct AdapterMemory {
  size_t rows = 0, gathered_stride = 0, inner_stride = 0;
  T* gathered = nullptr;
  T* inner = nullptr;  // x a^T

  size_t bytes() const { return rows * (gathered_stride + inner_stride) * sizeof(T); }
  void put(char* memory) {
    gathered = reinterpret_cast<T*>(memory);
    inner = gathered + rows * gathered_stride;
  }
};

// Computes the adapters' additions to a product of x[.., inputs], rows `ldx` elements apart.
// `parts`: the adapters' matrices for this product, that of adapter a at parts[a * apart]. All
// threads of a region call this with the same arguments. `inner` is null if no adapter changes the
// product.
//
// A row's bits depend on the row and its adapter alone.
template <class T>
Added<T> adapt(Crew& crew, const T* x, size_t ldx, const AdapterGroups& found, const RlLowRank* parts,
            size_t apart, const AdapterMemory<T>& memory);

}  // namespace rootlace
