// Errors as values. The library never throws, prints or exits: every call that can fail returns a Status or a Result.
#pragma once

#include <cassert>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

#include "dropkv/export.h"

namespace dropkv {

// Pinned numbers: the C ABI and Python hand them on. Never renumber.
enum class Code : int {
  kOk = 0,
  kInvalidArgument = 1,  // an argument is wrong; the message names it, what was expected and what came
  kUnsupported = 2,      // correct input that this build, machine or model cannot serve
  kNotFound = 3,         // a file, policy or kernel of that name does not exist
  kIo = 4,               // reading or writing failed
  kWorkspaceTooSmall = 5,
  kFailedPrecondition = 6,  // the call came at the wrong time
  kCancelled = 7,
  kInternal = 8,
};

// "invalid argument", "unsupported", ... ; never null.
DROPKV_API std::string_view CodeName(Code code);

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Code code, std::string message) : code_(code), message_(std::move(message)) {}

  static Status Ok() { return {}; }

  bool ok() const { return code_ == Code::kOk; }
  Code code() const { return code_; }
  const std::string& message() const { return message_; }

 private:
  Code code_ = Code::kOk;
  std::string message_;
};

// A value, or the Status that says why there is none.
template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : state_(std::move(value)) {}                                                  // NOLINT: implicit
  Result(Status status) : state_(std::move(status)) { assert(!std::get<Status>(state_).ok()); }  // NOLINT: implicit

  bool ok() const { return std::holds_alternative<T>(state_); }
  Status status() const { return ok() ? Status::Ok() : std::get<Status>(state_); }

  T& value() & { return std::get<T>(state_); }
  const T& value() const& { return std::get<T>(state_); }
  T value() && { return std::get<T>(std::move(state_)); }  // by value: nothing refers into a temporary
  T* operator->() { return &value(); }
  const T* operator->() const { return &value(); }
  T& operator*() & { return value(); }
  const T& operator*() const& { return value(); }
  T operator*() && { return std::move(*this).value(); }

 private:
  std::variant<T, Status> state_;
};

inline Status InvalidArgument(std::string message) { return {Code::kInvalidArgument, std::move(message)}; }
inline Status Unsupported(std::string message) { return {Code::kUnsupported, std::move(message)}; }

}  // namespace dropkv

#define DROPKV_RETURN_IF_ERROR(expression)                                                           \
  do {                                                                                               \
    if (::dropkv::Status dropkv_status_ = (expression); !dropkv_status_.ok()) return dropkv_status_; \
  } while (0)
