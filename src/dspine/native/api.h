// Marks the functions that Python calls; all others are hidden.
#pragma once

#define DSPINE_API __attribute__((visibility("default")))
