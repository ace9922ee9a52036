//! Writes each second's latencies as histograms in HdrHistogram's log format, which HdrHistogram's tools read and plot.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;
use std::time::{Duration, SystemTime};

use anyhow::{Context as _, anyhow};
use hdrhistogram::serialization::interval_log::{IntervalLogWriter, IntervalLogWriterBuilder, Tag};
use hdrhistogram::serialization::{V2DeflateSerializer, interval_log};

use crate::results::LoadRunResults;

const HISTOGRAM_LOG_INTERVAL_NS: u64 = 1_000_000_000;

/// Output file and serializer that a [`LatencyHistogramLog`] borrows.
pub struct HistogramLogOutput {
    log_file: Box<dyn Write>,
    serializer: V2DeflateSerializer,
}

impl HistogramLogOutput {
    /// Creates the log file. Without a path, everything written is discarded. Fails when the file cannot be created.
    pub fn create(path: Option<&Path>) -> anyhow::Result<Self> {
        let file: Box<dyn Write> = match path {
            Some(path) => {
                let file = File::create(path);
                let file = file.with_context(|| format!("cannot make the histogram log {}", path.display()))?;
                Box::new(BufWriter::new(file))
            }
            None => Box::new(io::sink()),
        };
        Ok(Self { log_file: file, serializer: V2DeflateSerializer::new() })
    }

    pub fn flush(&mut self) -> anyhow::Result<()> {
        self.log_file.flush().context("cannot write the histogram log")
    }
}

pub struct LatencyHistogramLog<'a> {
    writer: IntervalLogWriter<'a, 'a, Box<dyn Write>, V2DeflateSerializer>,
    /// Tag that marks each class's lines in the log.
    class_tags: Vec<String>,
    /// Start of the current interval, which has not been written yet (ns since the start of the run).
    interval_start_ns: u64,
}

impl<'a> LatencyHistogramLog<'a> {
    /// Begins a log with one tag for each class. Tags may not contain commas or white space. Fails when the log cannot
    /// be written.
    pub fn begin(output: &'a mut HistogramLogOutput, tags: Vec<String>, title: &str) -> anyhow::Result<Self> {
        let start_time = SystemTime::now();
        let writer = IntervalLogWriterBuilder::new()
            .add_comment(title)
            .add_comment("Values are nanoseconds, the column of the largest is in milliseconds.")
            .with_start_time(start_time)
            .with_base_time(start_time)
            .with_max_value_divisor(1e6)
            .begin_log_with(&mut output.log_file, &mut output.serializer)
            .context("cannot write the histogram log")?;
        Ok(Self { writer, class_tags: tags, interval_start_ns: 0 })
    }

    /// Writes the latencies of the current interval if it has ended by `elapsed_ns` (ns since the start of the run).
    /// Fails when the log cannot be written.
    pub fn write_interval_if_ended(&mut self, elapsed_ns: u64, results: &mut LoadRunResults) -> anyhow::Result<()> {
        if elapsed_ns >= self.interval_start_ns + HISTOGRAM_LOG_INTERVAL_NS {
            self.write_interval(elapsed_ns, results)
        } else {
            Ok(())
        }
    }

    /// Writes the latencies of the last, incomplete interval, which ends at `elapsed_ns` (ns since the start of the
    /// run). Fails when the log cannot be written.
    pub fn write_last_interval(mut self, elapsed_ns: u64, results: &mut LoadRunResults) -> anyhow::Result<()> {
        self.write_interval(elapsed_ns, results)
    }

    fn write_interval(&mut self, elapsed_ns: u64, results: &mut LoadRunResults) -> anyhow::Result<()> {
        let interval_start = Duration::from_nanos(self.interval_start_ns);
        let interval_duration = Duration::from_nanos(elapsed_ns.saturating_sub(self.interval_start_ns));
        for (histogram, tag) in
            results.interval_latency_histograms().zip(&self.class_tags).filter(|(histogram, _)| !histogram.is_empty())
        {
            let write_result = self.writer.write_histogram(histogram, interval_start, interval_duration, Tag::new(tag));
            write_result.map_err(|error: interval_log::IntervalLogWriterError<_>| {
                anyhow!("cannot write the histogram log: {error}")
            })?;
            histogram.reset();
        }
        self.interval_start_ns = elapsed_ns;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use base64::Engine as _;
    use hdrhistogram::Histogram;
    use hdrhistogram::serialization::Deserializer;
    use hdrhistogram::serialization::interval_log::{IntervalLogIterator, LogEntry};

    use super::*;
    use crate::outstanding_requests::SentRequest;

    /// Returns the start, duration, tag and histogram of every line of the log.
    fn read_log(path: &Path) -> Vec<(Duration, Duration, String, Histogram<u64>)> {
        let bytes = std::fs::read(path).unwrap();
        let log_entries = IntervalLogIterator::new(&bytes).map(|entry| entry.expect("a log"));
        let select_interval = |entry| match entry {
            LogEntry::Interval(interval) => Some(interval),
            _ => None,
        };
        let parse_interval = |interval: interval_log::IntervalLogHistogram<'_>| {
            let encoded_histogram =
                base64::engine::general_purpose::STANDARD.decode(interval.encoded_histogram()).unwrap();
            let histogram: Histogram<u64> = Deserializer::new().deserialize(&mut &encoded_histogram[..]).unwrap();
            let max_ms = histogram.max() as f64 / 1e6;
            assert!((interval.max() / max_ms - 1.0).abs() < 0.001, "{} against {max_ms} ms", interval.max());
            let tag = interval.tag().expect("every line has a tag").as_str().to_owned();
            (interval.start_timestamp(), interval.duration(), tag, histogram)
        };
        log_entries.filter_map(select_interval).map(parse_interval).collect()
    }

    #[test]
    fn logged_histograms_can_be_read_back_and_add_up_to_results() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("latencies.hlog");
        let mut results = LoadRunResults::new(2, 0..10_000_000_000, true).unwrap();
        let mut output = HistogramLogOutput::create(Some(&path)).unwrap();
        let tags = vec!["GET".to_owned(), "SCAN46".to_owned()];
        let mut log = LatencyHistogramLog::begin(&mut output, tags, "test").unwrap();
        let record_answers = |class, answer_count: u64, results: &mut LoadRunResults| {
            (1..=answer_count).for_each(|number| {
                results.record_answer(SentRequest { due_ns: 0, class_index: class }, number * 1_000_000, None)
            });
        };
        record_answers(0, 100, &mut results);
        log.write_interval_if_ended(999_999_999, &mut results).unwrap();
        record_answers(0, 100, &mut results);
        record_answers(1, 10, &mut results);
        log.write_interval_if_ended(1_100_000_000, &mut results).unwrap();
        record_answers(1, 1_000, &mut results);
        log.write_last_interval(1_500_000_000, &mut results).unwrap();
        output.flush().unwrap();

        let log_lines = read_log(&path);
        let line_summaries: Vec<_> = log_lines
            .iter()
            .map(|(start, duration, tag, histogram)| {
                (start.as_millis(), duration.as_millis(), &tag[..], histogram.len())
            })
            .collect();
        assert_eq!(line_summaries, [(0, 1_100, "GET", 200), (0, 1_100, "SCAN46", 10), (1_100, 400, "SCAN46", 1_000)]);
        // The sum of all intervals must equal the results of the whole run.
        let mut scan_latencies = log_lines[1].3.clone();
        scan_latencies.add(&log_lines[2].3).unwrap();
        assert_eq!(scan_latencies, results.classes[1].latency_ns);
    }
}
