// SPDX-License-Identifier: Apache-2.0
// The walk that the explorers share: depth first over all states of a model, each visited once.
#pragma once

#include <algorithm>
#include <cstring>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "host/explore.h"

namespace sm120::host {

// 128 bits of a state, by which it is known again.
struct Key {
  uint64_t a = 0x9E3779B97F4A7C15ull, b = 0xC2B2AE3D27D4EB4Full;
  bool operator==(const Key& other) const { return a == other.a && b == other.b; }
  void mix(uint64_t v) {
    a = (a ^ v) * 0xFF51AFD7ED558CCDull;
    a ^= a >> 32;
    b = (b + v) * 0xC4CEB9FE1A85EC53ull;
    b ^= b >> 29;
  }
};
struct KeyHash {
  size_t operator()(const Key& key) const { return key.a; }
};

// `Model` has Frame{state; std::string text;}, key_of, successors, finished(state), and
// violation_ with violation_step_, which successors set when a step shows a fault.
template <class Model>
ExploreResult walk(Model& model, uint64_t most_states) {
  using Frame = typename Model::Frame;
  ExploreResult result;
  std::unordered_set<Key, KeyHash> visited;
  std::vector<std::vector<Frame>> stack;  // the frames yet to visit at each depth
  decltype(Frame::state) start;
  memset(&start, 0, sizeof start);
  stack.push_back({Frame{start, "start"}});
  visited.insert(model.key_of(start));
  std::vector<std::string> path;
  auto report = [&](const std::string& what, const std::string& last) {
    result.violation = what;
    result.trace.assign(path.begin() + 1, path.end());
    if (!last.empty()) result.trace.push_back(last + "  <- " + what);
  };
  while (!stack.empty()) {
    if (stack.back().empty()) {
      stack.pop_back();
      if (!path.empty()) path.pop_back();
      continue;
    }
    const Frame frame = std::move(stack.back().back());
    stack.back().pop_back();
    path.push_back(frame.text);
    result.longest = std::max(result.longest, static_cast<uint32_t>(path.size() - 1));
    std::vector<Frame> next;
    model.successors(frame.state, next);
    if (!model.violation_.empty()) {
      report(model.violation_, model.violation_step_);
      break;
    }
    if (next.empty() && !model.finished(frame.state)) {
      report("lost data: no rank can move, and not all have finished", "");
      break;
    }
    result.transitions += next.size();
    std::vector<Frame> fresh;
    for (Frame& f : next) {
      if (visited.insert(model.key_of(f.state)).second) fresh.push_back(std::move(f));
    }
    stack.push_back(std::move(fresh));
    if (visited.size() > most_states) break;
  }
  result.states = visited.size();
  result.complete = stack.empty();
  return result;
}

}  // namespace sm120::host
