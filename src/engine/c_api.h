// What the files of the C ABI share: the edge at which exceptions end and errors become numbers, sized structs, and the
// conversions of views.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <new>
#include <string>
#include <vector>

#include "dropkv/cache_view.h"
#include "dropkv/dropkv.h"
#include "dropkv/engine.h"
#include "dropkv/keep_list.h"
#include "dropkv/policy.h"
#include "dropkv/status.h"

// Handles are what their names say; only dropkv_keep_list adds to it.
struct dropkv_engine {
  dropkv::Engine engine;
  std::string kernel;  // with the zero at its end that a string_view lacks
};

struct dropkv_plan {
  dropkv::Plan plan;
};

struct dropkv_keep_list {
  explicit dropkv_keep_list(dropkv::KeepList keep);

  dropkv::KeepList list;
  std::vector<int64_t> offsets;  // [layers * kv_heads + 1]
};

namespace dropkv::c_api {

// Keeps the message for dropkv_last_error and gives the number. Never allocates, so it may follow a bad_alloc.
dropkv_status Fail(Code code, const char* message) noexcept;

// Runs `call`, which returns a Status: no exception leaves the library.
template <typename Call>
dropkv_status Guard(const Call& call) noexcept {
  try {
    const Status status = call();
    return status.ok() ? DROPKV_OK : Fail(status.code(), status.message().c_str());
  } catch (const std::bad_alloc&) {
    return Fail(Code::kInternal, "out of memory");
  } catch (const std::exception& error) {
    return Fail(Code::kInternal, error.what());
  } catch (...) {
    return Fail(Code::kInternal, "an exception of unknown type");
  }
}

inline Status CheckPointer(const void* pointer, const char* name) {
  if (pointer != nullptr) return Status::Ok();
  return InvalidArgument(std::string(name) + ": expected a pointer, got null");
}

// Size of a sized struct in the first header that had it. Fields that came later are read by ReadInput alone.
template <typename Struct>
inline constexpr size_t kFirstSize = sizeof(Struct);
template <>
inline constexpr size_t kFirstSize<dropkv_shape> = offsetof(dropkv_shape, generated);
template <>
inline constexpr size_t kFirstSize<dropkv_layer> = offsetof(dropkv_layer, row_weights);

// Checks a sized struct of the caller: not null, and struct_size at least the first one. A caller with a newer header
// has a larger struct; `written` ones may be so, read ones only where the part that is unknown here is zero.
template <typename Struct>
Status CheckSized(const Struct* value, const char* name, bool written) {
  DROPKV_RETURN_IF_ERROR(CheckPointer(value, name));
  if (value->struct_size < kFirstSize<Struct>)
    return InvalidArgument(std::string(name) + ".struct_size: expected " + std::to_string(kFirstSize<Struct>) +
                           " or more, got " + std::to_string(value->struct_size));
  const auto* bytes = reinterpret_cast<const unsigned char*>(value);
  if (written || value->struct_size <= sizeof(Struct) ||
      std::all_of(bytes + sizeof(Struct), bytes + value->struct_size, [](auto byte) { return byte == 0; }))
    return Status::Ok();
  return Unsupported(std::string(name) + ": a field is set that this version (" + dropkv_version() +
                     ") does not know; struct_size is " + std::to_string(value->struct_size));
}

template <typename Struct>
Status CheckInput(const Struct* value, const char* name) {
  return CheckSized(value, name, false);
}

// A checked copy; 0 in the fields that a caller with an older header does not have.
template <typename Struct>
Result<Struct> ReadInput(const Struct* value, const char* name) {
  if (Status status = CheckInput(value, name); !status.ok()) return status;
  Struct copy = {};
  std::memcpy(&copy, value, std::min(value->struct_size, sizeof(Struct)));
  return copy;
}

template <typename Struct>
Status CheckOutput(const Struct* value, const char* name) {
  return CheckSized(value, name, true);
}

// Writes `value` into the caller's struct, whose own struct_size stays.
template <typename Struct>
void Store(Struct* target, Struct value) {
  value.struct_size = target->struct_size;
  *target = value;
}

KvView ToView(const dropkv_kv& kv);
MutableKvView ToView(const dropkv_mutable_kv& kv);
AttentionSpec ToSpec(const dropkv_attention& attention);

Result<Policy> ToPolicy(const dropkv_policy* in);
Result<Budget> ToBudget(const dropkv_budget* in);

// A list index that the caller gave.
Status CheckLayer(int32_t layer, const KeepList& keep);

}  // namespace dropkv::c_api
