// DROPKV_API marks what a shared build exports; everything else is hidden.
#pragma once

#define DROPKV_API __attribute__((visibility("default")))
