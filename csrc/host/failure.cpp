// SPDX-License-Identifier: Apache-2.0
// How a rank finds out that a call cannot finish, and how it tells the others.
#include <cstdio>

#include "host/engine.h"
#include "host/lanes.h"

namespace sm120::host {
namespace {

uint32_t load_acquire(const uint32_t* word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }

// A wait of bound / kTellShare is told to the peers: long before any of theirs that it causes
// expires.
constexpr uint64_t kTellShare = 8;

std::string record_text(const CallRecord& r) {
  return call_text(static_cast<Op>(r.kind >> 8), static_cast<Dtype>(r.kind & 0xFF), record_rows(r),
                   record_hidden(r));
}

std::string seconds(uint64_t ns) {
  char text[32];
  snprintf(text, sizeof text, "%.2f s", static_cast<double>(ns) * 1e-9);
  return text;
}

std::string missing_text(const Args& args, int culprit, const std::string& reason, int reporter,
                         int rank) {
  std::string text = "rank " + std::to_string(culprit) + " missing in call " +
                     std::to_string(args.call) + " (" + op_name(args.op) + ", " +
                     std::to_string(args.total_rows) + " x " + std::to_string(args.shape.hidden) +
                     "): " + reason;
  if (reporter != rank) text += ", as rank " + std::to_string(reporter) + " reports";
  return text + "; this is rank " + std::to_string(rank) + ". Look at the log of rank " +
         std::to_string(culprit) + " and restart the group";
}

}  // namespace

std::string Engine::mismatch_text(int culprit, const CallRecord& theirs) const {
  std::string mine_text = record_text(record_);
  std::string their_text = record_text(theirs);
  if (mine_text == their_text) {
    mine_text += " (call " + std::to_string(record_epoch(record_)) + ", plan " +
                 std::to_string(record_.plan) + ")";
    their_text += " (call " + std::to_string(record_epoch(theirs)) + ", plan " +
                  std::to_string(theirs.plan) + ")";
  }
  return "call mismatch in call " + std::to_string(args_.call) + ": rank " +
         std::to_string(culprit) + " called " + their_text + ", this rank " +
         std::to_string(rank_) + " called " + mine_text +
         ". All ranks must call the same operation with the same shape, in the same order";
}

Failure Engine::check() const {
  if (failure_.why != Abort::kNone) return failure_;
  // A mismatch this rank sees itself says more than another rank's report of it.
  for (int peer = 0; peer < topology_.world; ++peer) {
    if (peer == rank_) continue;
    const CallRecord theirs = record_from(peer);
    if (record_arrived(theirs) && !same_call(theirs, record_)) {
      return {Abort::kMismatch, peer, mismatch_text(peer, theirs)};
    }
  }
  return aborted();
}

Failure Engine::aborted() const {
  const uint32_t code = load_acquire(&page()->abort);
  if (code == 0) return {};
  const Abort why = abort_why(code);
  const int culprit = static_cast<int>(abort_culprit(code));
  const int reporter = static_cast<int>(abort_reporter(code));
  const AbortNote& note = page()->note[reporter];
  if (why == Abort::kMismatch) {
    // A peer may be one call ahead. Its mismatch is of that call; this one still has all its data.
    if (record_epoch(note.reporter_call) == ((record_epoch(record_) + 1) & kEpochMask)) return {};
    // Whichever of the two differs from this rank's call is the one to name.
    const bool culprit_differs = !same_call(note.culprit_call, record_);
    return {why, culprit,
            mismatch_text(culprit_differs ? culprit : reporter,
                          culprit_differs ? note.culprit_call : note.reporter_call)};
  }
  const char* reason = why == Abort::kDied   ? "its process died"
                       : why == Abort::kLeft ? "it closed its communicator"
                                             : "no data from it within the bound";
  return {why, culprit, missing_text(args_, culprit, reason, reporter, rank_)};
}

uint32_t Engine::stuck_cta() const {
  uint32_t stuck = 0;
  Phase earliest = Phase::kIdle;
  for (uint32_t c = 0; c < plan_.ctas; ++c) {
    const Phase phase = ctas_[c].waiting().phase;
    if (phase == Phase::kIdle || (earliest != Phase::kIdle && phase >= earliest)) continue;
    earliest = phase;
    stuck = c;
  }
  return stuck;
}

Failure Engine::check_wait(const Cta& cta, uint64_t waited_ns, uint64_t bound_ns, uint32_t dead,
                           uint32_t left) {
  constexpr uint64_t kLastGasp = 1'000'000'000;
  const Cta::Wait wait = cta.waiting();
  for (int peer = 0; peer < topology_.world; ++peer) {
    const uint32_t bit = 1u << peer;
    if (peer == rank_ || ((dead | left) & bit) == 0) continue;
    const bool silent = !announced(peer);
    // What a dead rank stored before it died still counts; blame it for what only it could send, or
    // when nothing at all moves.
    const bool certain = silent || ((dead & bit) && (wait.source == peer || waited_ns > kLastGasp));
    if (!certain) continue;
    const Abort why = (dead & bit) ? Abort::kDied : Abort::kLeft;
    const char* reason = why == Abort::kDied ? "its process died" : "it closed its communicator";
    return {why, peer, missing_text(args_, peer, reason, rank_, rank_)};
  }
  if (waited_ns >= bound_ns / kTellShare) tell_wait(wait);
  if (waited_ns < bound_ns) return {};
  const int culprit = source_of_trouble(wait.source);
  return {Abort::kMissing, culprit,
          missing_text(args_, culprit, "no data from it for " + seconds(waited_ns), rank_, rank_)};
}

// A rank that has not begun this call says more than the tile that happens to be polled: it is
// stuck in the call before, or gone.
int Engine::first_absent() const {
  for (int peer = 0; peer < topology_.world; ++peer) {
    if (peer != rank_ && !announced(peer)) return peer;
  }
  return -1;
}

void Engine::tell_wait(const Cta::Wait& wait) {
  const int absent = first_absent();
  const uint32_t epoch = record_epoch(record_);
  tell_wait(absent >= 0
                ? wait_word(epoch, Phase::kIdle, 0, static_cast<uint32_t>(absent))
                : wait_word(epoch, wait.phase, wait.step, static_cast<uint32_t>(wait.source)));
}

void Engine::tell_wait(uint64_t word) {
  if (word == told_wait_) return;
  told_wait_ = word;
  for (int peer = 0; peer < topology_.world; ++peer) {
    if (link_ != nullptr && peer != rank_ && !link_->alive(rank_, peer)) continue;
    __atomic_store_n(&page_of(peer)->waits[rank_], word, __ATOMIC_RELEASE);
  }
}

// From `start` to the rank that its chain of waits ends at: one that waits for nobody. -1 when the
// chain closes on itself; the waits it went through then compete to be the earliest.
int Engine::follow(int start, uint64_t* earliest) const {
  uint32_t seen = 0;
  for (int at = start; (seen & (1u << at)) == 0;) {
    seen |= 1u << at;
    const uint64_t word = __atomic_load_n(&page()->waits[at], __ATOMIC_ACQUIRE);
    if (word == 0) return at;
    if (word < *earliest) *earliest = word;
    at = wait_source(word);
  }
  return -1;
}

int Engine::source_of_trouble(int polled) const {
  uint64_t earliest = ~uint64_t{0};
  if (first_absent() < 0) {
    const int end = follow(polled, &earliest);
    return end >= 0 ? end : wait_source(earliest);
  }
  for (int peer = 0; peer < topology_.world; ++peer) {
    if (peer == rank_ || announced(peer)) continue;
    const int end = follow(peer, &earliest);
    if (end >= 0) return end;
  }
  // Circles only, as when stores are lost on one edge: whoever waits for the earliest data is
  // right.
  return wait_source(earliest);
}

void Engine::fail(const Failure& failure, const Cta& cta, uint64_t waited_ns) {
  failure_ = failure;
  ControlPage* own = page();
  const Cta::Wait wait = cta.waiting();
  own->flight = FlightRecord{1,
                             static_cast<uint32_t>(rank_),
                             static_cast<uint32_t>(channel_),
                             static_cast<uint32_t>(wait.phase),
                             wait.tile,
                             static_cast<uint32_t>(failure.culprit),
                             static_cast<uint32_t>(args_.op),
                             static_cast<uint32_t>(plan_.dtype),
                             args_.total_rows,
                             args_.shape.hidden,
                             args_.call,
                             waited_ns};
  const uint32_t code =
      abort_code(failure.why, static_cast<uint32_t>(failure.culprit), static_cast<uint32_t>(rank_));
  for (int peer = 0; peer < topology_.world; ++peer) {
    if (peer != rank_ && link_ != nullptr && !link_->alive(rank_, peer)) continue;
    ControlPage* page = page_of(peer);
    page->note[rank_] =
        AbortNote{record_, failure.culprit == rank_ ? record_ : record_from(failure.culprit)};
    __atomic_store_n(&page->abort, code, __ATOMIC_RELEASE);
  }
  wake((1u << topology_.world) - 1);
  const uint64_t elements = static_cast<uint64_t>(args_.shape.rows) * args_.shape.hidden;
  if (args_.out != nullptr) lanes::fill_nan(plan_.dtype, args_.out, elements);
  if (args_.residual_out != nullptr) lanes::fill_nan(plan_.dtype, args_.residual_out, elements);
}

}  // namespace sm120::host
