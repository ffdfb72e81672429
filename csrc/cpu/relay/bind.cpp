// The Python bindings of the relay; every call that may wait releases the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "cpu/relay/network.h"
#include "cpu/relay/relay.h"

namespace nb = nanobind;

namespace gradwire::relay {
namespace {

using Numbers = std::vector<double>;

double ns_per_byte(double bits_per_second) { return bits_per_second == 0 ? 0 : 8e9 / bits_per_second; }

// Rates in bits per second (0: no limit), times in seconds; delay, jitter and loss by source, then target.
Network make_network(const Numbers& rates, const Numbers& queues, const Numbers& delays, const Numbers& jitters,
                     const Numbers& losses, bool reorder, std::uint64_t seed) {
  const std::size_t nodes = rates.size(), pairs = nodes * nodes;
  if (nodes == 0 || queues.size() != nodes || delays.size() != pairs || jitters.size() != pairs || losses.size() != pairs)
    throw std::invalid_argument("wanted a rate and a queue for each node, and a path for each pair of nodes");
  std::vector<Link> links(nodes);
  std::vector<Path> paths(pairs);
  for (std::size_t node = 0; node < nodes; ++node) {
    links[node].ns_per_byte = ns_per_byte(rates[node]);
    links[node].queue = std::llround(queues[node] * 1e9);
  }
  for (std::size_t at = 0; at < pairs; ++at)
    paths[at] = {std::llround(delays[at] * 1e9), std::llround(jitters[at] * 1e9), losses[at]};
  return {std::move(links), std::move(paths), reorder, seed};
}

using CountRow = std::tuple<std::uint64_t, std::uint64_t, std::uint64_t, std::uint64_t, std::uint64_t>;

std::vector<CountRow> rows(const std::vector<Counts>& counts) {
  std::vector<CountRow> found;
  for (const Counts& each : counts)
    found.emplace_back(each.offered, each.offered_nbytes, each.lost, each.dropped, each.delivered);
  return found;
}

// A network without frames and without a clock: what becomes of frames that are sent at given times.
class Timeline {
 public:
  Timeline(const Numbers& rates, const Numbers& queues, const Numbers& delays, const Numbers& jitters,
           const Numbers& losses, bool reorder, std::uint64_t seed)
      : network_(make_network(rates, queues, delays, jitters, losses, reorder, seed)) {}

  // Frames as (sent at, source, target, bytes), by the time of sending; looks for due ones every `tick`. Times in
  // nanoseconds. Returns by frame when it was there, -1 if never; and the frames as they were handed over.
  std::tuple<std::vector<std::int64_t>, std::vector<std::uint64_t>> pass(
      const std::vector<std::tuple<std::int64_t, std::uint32_t, std::uint32_t, std::uint32_t>>& frames,
      std::int64_t tick) {
    std::vector<std::int64_t> there(frames.size(), -1);
    std::vector<std::uint64_t> order;
    std::vector<std::uintptr_t> gone;
    const auto look = [&](Nanoseconds now) {
      Delivery delivery;
      while (network_.next(now, delivery, gone)) {
        there[delivery.frame] = delivery.due;
        order.push_back(delivery.frame);
      }
    };
    if (tick <= 0) throw std::invalid_argument("`tick` is not positive");
    Nanoseconds looked = 0;
    for (std::size_t at = 0; at < frames.size(); ++at) {
      const auto& [now, source, target, nbytes] = frames[at];
      if (source >= network_.nodes() || target >= network_.nodes())
        throw std::invalid_argument("a frame of a node that is not there");
      while (looked + tick <= now) look(looked += tick);
      network_.offer(now, source, target, nbytes, at);
    }
    while (!network_.idle()) look(looked += tick);
    return {there, order};
  }
  std::vector<CountRow> counts() const { return rows(network_.counts()); }

 private:
  Network network_;
};

}  // namespace
}  // namespace gradwire::relay

void bind_relay(nb::module_& m) {
  using namespace gradwire::relay;
  nb::class_<Relay>(m, "Relay")
      .def(
          "__init__",
          [](Relay* self, const std::vector<std::string>& interfaces, std::size_t mtu, const Numbers& rates,
             const Numbers& queues, const Numbers& delays, const Numbers& jitters, const Numbers& losses, bool reorder,
             std::uint64_t seed) {
            if (interfaces.size() != rates.size()) throw std::invalid_argument("wanted a rate for each interface");
            new (self) Relay(interfaces, mtu, make_network(rates, queues, delays, jitters, losses, reorder, seed));
          },
          nb::arg("interfaces"), nb::arg("mtu"), nb::arg("rates"), nb::arg("queues"), nb::arg("delays"),
          nb::arg("jitters"), nb::arg("losses"), nb::arg("reorder"), nb::arg("seed"))
      .def("run", &Relay::run, nb::call_guard<nb::gil_scoped_release>())
      .def("stop", &Relay::stop, nb::call_guard<nb::gil_scoped_release>())
      .def("limit", [](Relay& relay, std::uint32_t node, double rate) { relay.limit(node, ns_per_byte(rate)); },
           nb::arg("node"), nb::arg("bits_per_second"), nb::call_guard<nb::gil_scoped_release>())
      .def("counts", [](Relay& relay) {
            const auto release_and_count = [&relay] {
              const nb::gil_scoped_release no_gil;
              return relay.counts();
            };
            return rows(release_and_count());
          })
      .def("overrun", &Relay::overrun, nb::call_guard<nb::gil_scoped_release>());
  nb::class_<Timeline>(m, "RelayTimeline")
      .def(nb::init<const Numbers&, const Numbers&, const Numbers&, const Numbers&, const Numbers&, bool, std::uint64_t>(),
           nb::arg("rates"), nb::arg("queues"), nb::arg("delays"), nb::arg("jitters"), nb::arg("losses"),
           nb::arg("reorder"), nb::arg("seed"))
      .def("pass_frames", &Timeline::pass, nb::arg("frames"), nb::arg("tick"))
      .def("counts", &Timeline::counts);
}
