// Finds the NCCL of this process: the one that torch has loaded.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "collective/nccl/nccl_api.h"

namespace fusewire {

// What `fusewire info` tells.
struct NcclFacts {
  struct Feature {
    std::string name;
    std::string why_off;  // empty where it is there
  };
  int version = 0;      // of the library that was found, usable or not
  std::string path;     // of that library
  std::string problem;  // why it cannot be used; empty where it can
  std::vector<Feature> features{};
};

// One library, opened. `api` is null where there is a problem; it works as long as the process lives.
struct NcclLibrary {
  NcclFacts facts;
  std::unique_ptr<NcclApi> api;
};
NcclLibrary open_nccl(const std::string& name);

// The NCCL of this process, looked for until it is found. Null, and why, where it cannot be used.
NcclApi* find_nccl(std::string* why_not);
NcclFacts nccl_facts();

std::string nccl_version_text(int version);  // "2.28.3"

}  // namespace fusewire
