#include "dropkv/status.h"

namespace dropkv {

std::string_view CodeName(Code code) {
  switch (code) {
    case Code::kOk:
      return "ok";
    case Code::kInvalidArgument:
      return "invalid argument";
    case Code::kUnsupported:
      return "unsupported";
    case Code::kNotFound:
      return "not found";
    case Code::kIo:
      return "input or output error";
    case Code::kWorkspaceTooSmall:
      return "workspace too small";
    case Code::kFailedPrecondition:
      return "failed precondition";
    case Code::kCancelled:
      return "cancelled";
    case Code::kInternal:
      return "internal error";
  }
  return "unknown code";
}

}  // namespace dropkv
