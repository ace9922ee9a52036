//! Latencies of a server simulation, summarized as quantiles.

use hdrhistogram::Histogram;
use serde::Serialize;

use super::server::{ResponseSink, SimulatedResponse};
use super::ticks::{NEVER, TICKS_PER_SERVICE_TIME_UNIT, Tick, ticks_to_time_units, time_units_to_ticks};

/// Mean and quantiles of the latency, in units of service time and within 0.05 %. Latency is measured from a request's
/// arrival at the NIC to its response's departure.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct LatencySummary {
    pub mean: f64,
    /// Median of the latency.
    pub p50: f64,
    /// 90th percentile of the latency.
    pub p90: f64,
    /// 99th percentile of the latency.
    pub p99: f64,
    /// 99.9th percentile of the latency.
    pub p999: f64,
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct ClassLatency {
    /// Service time of the class, or the mean service time if the distribution has no classes (in units of service
    /// time).
    pub service: f64,
    #[serde(flatten)]
    pub quantiles: LatencySummary,
}

/// Latencies of the responses that left the server within one window of time.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct WindowLatency {
    /// Start of the window, in units of service time.
    pub from: f64,
    pub responses: u64,
    #[serde(flatten)]
    pub quantiles: LatencySummary,
}

#[derive(Debug, Clone)]
pub struct LatencyHistogram {
    histogram: Histogram<u64>,
    /// Exact sum of all latencies (ticks). The histogram alone would only yield an approximate sum.
    latency_sum_ticks: u128,
}

impl LatencyHistogram {
    fn new() -> Self {
        let mut histogram =
            Histogram::new_with_max(TICKS_PER_SERVICE_TIME_UNIT << 10, 3).expect("3 digits are allowed");
        histogram.auto(true);
        Self { histogram, latency_sum_ticks: 0 }
    }

    #[inline]
    fn record(&mut self, latency: Tick) {
        self.histogram.record(latency).expect("a histogram that grows takes every value");
        self.latency_sum_ticks += u128::from(latency);
    }

    fn merge(&mut self, other: &Self) {
        self.histogram.add(&other.histogram).expect("a histogram that grows takes every value");
        self.latency_sum_ticks += other.latency_sum_ticks;
    }

    /// Returns mean and quantiles of the latencies, or `None` if there are none.
    fn summarize(&self) -> Option<LatencySummary> {
        let latency_count = self.histogram.len();
        if latency_count == 0 {
            return None;
        }
        let latency_at_quantile = |quantile| {
            ticks_to_time_units(self.histogram.median_equivalent(self.histogram.value_at_quantile(quantile)))
        };
        let mean = self.latency_sum_ticks as f64 / latency_count as f64 / TICKS_PER_SERVICE_TIME_UNIT as f64;
        Some(LatencySummary {
            mean,
            p50: latency_at_quantile(0.5),
            p90: latency_at_quantile(0.9),
            p99: latency_at_quantile(0.99),
            p999: latency_at_quantile(0.999),
        })
    }
}

#[derive(Debug)]
pub struct LatencyRecorder {
    measurement_start: Tick,
    class_histograms: Vec<LatencyHistogram>,
    windows: Option<LatencyWindows>,
}

#[derive(Debug)]
struct LatencyWindows {
    window_length: Tick,
    window_start: Tick,
    window_histogram: LatencyHistogram,
    closed_windows: Vec<WindowLatency>,
}

impl LatencyRecorder {
    /// Creates a recorder for `class_count` classes. If a window length is given, in units of service time, it also
    /// records latencies over time.
    pub fn new(class_count: usize, window_length: Option<f64>) -> Self {
        let windows = window_length.map(|length| LatencyWindows {
            window_length: time_units_to_ticks(length),
            window_start: 0,
            window_histogram: LatencyHistogram::new(),
            closed_windows: Vec::new(),
        });
        Self {
            measurement_start: NEVER,
            class_histograms: (0..class_count).map(|_| LatencyHistogram::new()).collect(),
            windows,
        }
    }

    /// Returns the latencies of all classes together, or `None` if there were no responses.
    pub fn overall_latency(&self) -> Option<LatencySummary> {
        let mut all_classes = LatencyHistogram::new();
        self.class_histograms.iter().for_each(|class| all_classes.merge(class));
        all_classes.summarize()
    }

    /// Returns the latencies of each class, which are `None` for a class without responses.
    pub fn class_latencies(&self) -> impl Iterator<Item = Option<LatencySummary>> {
        self.class_histograms.iter().map(LatencyHistogram::summarize)
    }

    pub fn into_window_latencies(self) -> Vec<WindowLatency> {
        self.windows.map_or(Vec::new(), |mut windows| {
            windows.close_window();
            windows.closed_windows
        })
    }
}

impl LatencyWindows {
    fn record(&mut self, response: &SimulatedResponse) {
        if response.departed_at >= self.window_start + self.window_length {
            self.close_window();
            self.window_start = response.departed_at / self.window_length * self.window_length;
        }
        self.window_histogram.record(response.departed_at - response.request.arrived_at);
    }

    fn close_window(&mut self) {
        if let Some(quantiles) = self.window_histogram.summarize() {
            self.closed_windows.push(WindowLatency {
                from: ticks_to_time_units(self.window_start),
                responses: self.window_histogram.histogram.len(),
                quantiles,
            });
            self.window_histogram.histogram.reset();
            self.window_histogram.latency_sum_ticks = 0;
        }
    }
}

/// Observer that measures the responses of a simulation.
pub trait ResponseObserver: ResponseSink {
    /// Ends the warm-up. Requests that arrive at `start_time` or later are measured.
    fn begin_measurement_at(&mut self, start_time: Tick);

    /// Returns whether the observer's result is already certain. If so, the simulation can end early.
    fn can_end_simulation_early(&self) -> bool {
        false
    }
}

impl ResponseSink for LatencyRecorder {
    #[inline]
    fn handle_response(&mut self, response: &SimulatedResponse) {
        if response.request.arrived_at < self.measurement_start {
            return;
        }
        self.class_histograms[usize::from(response.request.class_index)]
            .record(response.departed_at - response.request.arrived_at);
        if let Some(windows) = &mut self.windows {
            windows.record(response);
        }
    }
}

impl ResponseObserver for LatencyRecorder {
    fn begin_measurement_at(&mut self, start_time: Tick) {
        self.measurement_start = start_time;
        if let Some(windows) = &mut self.windows {
            windows.window_start = start_time / windows.window_length * windows.window_length;
        }
    }
}
