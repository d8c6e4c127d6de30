// What free memory a request may have: in lists, in holes of shared segments, or as pieces of several pages.
//
// In: a request, with where its stream stands in a capture. Out: a free block for it, which is still listed, or a live one
// in a window (stitch.cc); null: nothing that is mapped is right. It asks the driver for nothing, but that pieces are
// mapped side by side, which its `Supply` does.
//
// Guarantee: each block that is found meets its condition for the request's stream: its stream and tag, or it was freed at
// a point of its owner that the request's stream has in its past, or it is settled and the stream may have what is. With
// `verify` the proof is made once more, by brute force, and a block that fails is withheld.
// Lock: the device's is held during all calls.
#pragma once

#include <vector>

#include "core/lifetimes.h"
#include "core/pool.h"
#include "core/stats.h"
#include "core/supply.h"

namespace mg {

struct Request {
  size_t asked;
  size_t size;
  Stream stream;
  Pool* pool;
  Observation seen;
};

class Search;

// The streams of a capture whose blocks another one may have, and up to which of their points.
struct Owner {
  Stream stream;
  Tag order_tag, proof_tag;
  uint64_t cover;
};

// Whether a free block of a shared segment may go to this request now. What was used on its stream alone need only have
// begun when it is used again, the rest has to be over; where kernels begin early, neighbours must all be of the one or of
// the other.
class May {
 public:
  enum Which { any, begun, over };
  May(Search& search, const Request& request, Which which);
  bool operator()(const Block& block) const;

 private:
  const Request& request_;
  std::vector<Owner> owners_;
  Tag order_tag_ = settled, proof_tag_ = settled;
  bool settled_too_ = true;
};

class Search {
 public:
  Search(const Config& config, Supply& supply, Lifetimes& lifetimes, Stats& stats)
      : config_(config), supply_(supply), lifetimes_(lifetimes), stats_(stats) {}

  // Of what is mapped. A block that is in no window is free and still where it was found.
  Block* find(Request& request);

  // A block in a window that needs pages which are mapped now, where `room` is; no more than would be missing without
  // pieces. Null: no pieces, or the driver refused.
  Block* stitch_fresh(const Request& request, const May& may, Pool::Room room);

  // Whether the request is served from what captures share. Where streams do not take turns, each is better served from
  // ranges of its own.
  bool shared(const Request& request) const {
    return supply_.expandable() && config_.reuse == Reuse::any_stream && request.seen.view != nullptr;
  }
  // Whether it may be made of pieces of pages. Not where kernels begin early: memory is seen by its other addresses once
  // what wrote it is complete.
  bool may_stitch(const Request& request) const {
    return config_.stitch && request.size >= size_class::stitch_limit && request.size < size_class::medium_limit &&
           request.seen.view->partial_at == 0;
  }

  // Of neighbours from `first` on, of which the stream may have each: one free block of at least the request's size; one
  // of exactly `size` that is this stream's.
  Block* out_of(const Request& request, Block* first);
  Block* gather(const Request& request, Block* first, size_t size);

  // When verifying: what is not proven again nobody gets before the captures end.
  bool verified(const Request& request, Block* block);

  std::vector<Owner> owners(const Request& request);

 private:
  Block* find_covered(const Request& request, size_class::Kind kind);
  Block* find_shared(Request& request);
  bool proven_again(const Request& request, const Block* block);
  // stitch.cc
  Block* stitch_cached(const Request& request, const May& may, bool fits);
  Block* stitch(const Request& request, const Plan& plan);

  const Config& config_;
  Supply& supply_;
  Lifetimes& lifetimes_;
  Stats& stats_;
};

}  // namespace mg
