// The C ABI's keep lists, compaction, ragged cache and decode attention.
#include <utility>

#include "dropkv/ragged_cache.h"
#include "engine/c_api.h"

struct dropkv_cache {
  dropkv::RaggedCache cache;
};

struct dropkv_decode {
  dropkv::RaggedDecode decode;
};

dropkv_keep_list::dropkv_keep_list(dropkv::KeepList keep) : list(std::move(keep)) {
  offsets.reserve(static_cast<size_t>(list.layers()) * list.kv_heads() + 1);
  offsets.push_back(0);
  for (int32_t layer = 0; layer < list.layers(); ++layer)
    for (int32_t head = 0; head < list.kv_heads(); ++head)
      offsets.push_back(offsets.back() + static_cast<int64_t>(list.head(layer, head).size()));
}

namespace dropkv::c_api {
namespace {

// A list of the caller's: offsets from 0 upwards, each list strictly ascending from 0 or more.
Result<KeepList> ToKeepList(const dropkv_keep_view* view) {
  if (Status status = CheckInput(view, "view"); !status.ok()) return status;
  if (view->layers < 1) return InvalidArgument("view.layers: expected at least 1, got " + std::to_string(view->layers));
  if (view->kv_heads < 1)
    return InvalidArgument("view.kv_heads: expected at least 1, got " + std::to_string(view->kv_heads));
  if (Status status = CheckPointer(view->offsets, "view.offsets"); !status.ok()) return status;
  const size_t lists = static_cast<size_t>(view->layers) * view->kv_heads;
  if (view->offsets[0] != 0)
    return InvalidArgument("view.offsets[0]: expected 0, got " + std::to_string(view->offsets[0]));
  for (size_t i = 0; i < lists; ++i)
    if (view->offsets[i + 1] < view->offsets[i])
      return InvalidArgument("view.offsets[" + std::to_string(i + 1) + "]: expected at least " +
                             std::to_string(view->offsets[i]) + ", got " + std::to_string(view->offsets[i + 1]));
  if (view->offsets[lists] > 0)
    if (Status status = CheckPointer(view->positions, "view.positions"); !status.ok()) return status;
  for (size_t i = 0; i < lists; ++i) {
    int32_t previous = -1;
    for (int64_t at = view->offsets[i]; at < view->offsets[i + 1]; ++at) {
      if (view->positions[at] <= previous)
        return InvalidArgument("view.positions[" + std::to_string(at) + "]: expected more than " +
                               std::to_string(previous) + ", got " + std::to_string(view->positions[at]));
      previous = view->positions[at];
    }
  }
  return KeepList(view->layers, view->kv_heads, {view->offsets, view->offsets + lists + 1},
                  {view->positions, view->positions + view->offsets[lists]});
}

}  // namespace
}  // namespace dropkv::c_api

using namespace dropkv;         // NOLINT(google-build-using-namespace): the functions below are outside any namespace
using namespace dropkv::c_api;  // NOLINT(google-build-using-namespace)

dropkv_status dropkv_keep_list_create(const dropkv_keep_view* view, dropkv_keep_list** keep) {
  return Guard([&]() -> Status {
    auto list = ToKeepList(view);
    if (!list.ok()) return list.status();
    DROPKV_RETURN_IF_ERROR(CheckPointer(keep, "keep"));
    *keep = new dropkv_keep_list(std::move(list).value());
    return Status::Ok();
  });
}

dropkv_status dropkv_keep_list_get(const dropkv_keep_list* keep, dropkv_keep_view* view) {
  return Guard([&]() -> Status {
    DROPKV_RETURN_IF_ERROR(CheckPointer(keep, "keep"));
    DROPKV_RETURN_IF_ERROR(CheckOutput(view, "view"));
    // The lists lie one behind the other, so the first one's start is the start of all.
    Store(view, {0, keep->list.layers(), keep->list.kv_heads(), keep->offsets.data(), keep->list.head(0, 0).data()});
    return Status::Ok();
  });
}

void dropkv_keep_list_free(dropkv_keep_list* keep) { delete keep; }

dropkv_status dropkv_compact(const dropkv_kv* source, const dropkv_keep_list* keep, int32_t layer,
                             const dropkv_mutable_kv* destination) {
  return Guard([&]() -> Status {
    DROPKV_RETURN_IF_ERROR(CheckPointer(source, "source"));
    DROPKV_RETURN_IF_ERROR(CheckPointer(keep, "keep"));
    DROPKV_RETURN_IF_ERROR(CheckLayer(layer, keep->list));
    DROPKV_RETURN_IF_ERROR(CheckPointer(destination, "destination"));
    return Compact(ToView(*source), keep->list, layer, ToView(*destination));
  });
}

dropkv_status dropkv_compact_in_place(const dropkv_mutable_kv* cache, const int32_t* cells,
                                      const dropkv_keep_list* keep, int32_t layer) {
  return Guard([&]() -> Status {
    DROPKV_RETURN_IF_ERROR(CheckPointer(cache, "cache"));
    DROPKV_RETURN_IF_ERROR(CheckPointer(keep, "keep"));
    DROPKV_RETURN_IF_ERROR(CheckLayer(layer, keep->list));
    return CompactInPlace(ToView(*cache), cells, keep->list, layer);
  });
}

dropkv_status dropkv_cache_create(int32_t dtype, int32_t kv_heads, int32_t key_dim, int32_t value_dim,
                                  dropkv_cache** cache) {
  return Guard([&]() -> Status {
    DROPKV_RETURN_IF_ERROR(CheckPointer(cache, "cache"));
    auto created = RaggedCache::Create(static_cast<DType>(dtype), kv_heads, key_dim, value_dim);
    if (!created.ok()) return created.status();
    *cache = new dropkv_cache{std::move(created).value()};
    return Status::Ok();
  });
}

void dropkv_cache_free(dropkv_cache* cache) { delete cache; }

dropkv_status dropkv_cache_assign(dropkv_cache* cache, const dropkv_kv* source, const dropkv_keep_list* keep,
                                  int32_t layer, int32_t reserve) {
  return Guard([&]() -> Status {
    DROPKV_RETURN_IF_ERROR(CheckPointer(cache, "cache"));
    DROPKV_RETURN_IF_ERROR(CheckPointer(source, "source"));
    DROPKV_RETURN_IF_ERROR(CheckPointer(keep, "keep"));
    DROPKV_RETURN_IF_ERROR(CheckLayer(layer, keep->list));
    return cache->cache.Assign(ToView(*source), keep->list, layer, reserve);
  });
}

dropkv_status dropkv_cache_append(dropkv_cache* cache, const dropkv_kv* source, int32_t token) {
  return Guard([&]() -> Status {
    DROPKV_RETURN_IF_ERROR(CheckPointer(cache, "cache"));
    DROPKV_RETURN_IF_ERROR(CheckPointer(source, "source"));
    return cache->cache.Append(ToView(*source), token);
  });
}

dropkv_status dropkv_cache_truncate(dropkv_cache* cache, int32_t count) {
  return Guard([&]() -> Status {
    DROPKV_RETURN_IF_ERROR(CheckPointer(cache, "cache"));
    return cache->cache.Truncate(count);
  });
}

dropkv_status dropkv_cache_get(const dropkv_cache* cache, dropkv_cache_info* info) {
  return Guard([&]() -> Status {
    DROPKV_RETURN_IF_ERROR(CheckPointer(cache, "cache"));
    DROPKV_RETURN_IF_ERROR(CheckOutput(info, "info"));
    const RaggedCache& held = cache->cache;
    Store(info, {0, static_cast<int32_t>(held.dtype()), held.kv_heads(), held.key_dim(), held.value_dim(),
                 held.capacity_bytes(), held.used_bytes()});
    return Status::Ok();
  });
}

dropkv_status dropkv_cache_length(const dropkv_cache* cache, int32_t head, int32_t* tokens) {
  return Guard([&]() -> Status {
    DROPKV_RETURN_IF_ERROR(CheckPointer(cache, "cache"));
    DROPKV_RETURN_IF_ERROR(CheckPointer(tokens, "tokens"));
    if (head < 0 || head >= cache->cache.kv_heads())
      return InvalidArgument("head: expected 0 to " + std::to_string(cache->cache.kv_heads() - 1) + ", got " +
                             std::to_string(head));
    *tokens = cache->cache.length(head);
    return Status::Ok();
  });
}

dropkv_status dropkv_decode_create(int32_t kv_heads, int32_t group, int32_t key_dim, int32_t value_dim,
                                   dropkv_decode** decode) {
  return Guard([&]() -> Status {
    DROPKV_RETURN_IF_ERROR(CheckPointer(decode, "decode"));
    auto created = RaggedDecode::Create(kv_heads, group, key_dim, value_dim);
    if (!created.ok()) return created.status();
    *decode = new dropkv_decode{std::move(created).value()};
    return Status::Ok();
  });
}

void dropkv_decode_free(dropkv_decode* decode) { delete decode; }

dropkv_status dropkv_decode_run(dropkv_decode* decode, dropkv_engine* engine, const dropkv_cache* cache,
                                const dropkv_attention* attention, const float* q, float* out) {
  return Guard([&]() -> Status {
    DROPKV_RETURN_IF_ERROR(CheckPointer(decode, "decode"));
    DROPKV_RETURN_IF_ERROR(CheckPointer(cache, "cache"));
    DROPKV_RETURN_IF_ERROR(CheckPointer(attention, "attention"));
    DROPKV_RETURN_IF_ERROR(CheckPointer(q, "q"));
    DROPKV_RETURN_IF_ERROR(CheckPointer(out, "out"));
    return decode->decode.Run(cache->cache, ToSpec(*attention), q, out,
                              engine != nullptr ? engine->engine.pool() : nullptr);
  });
}
