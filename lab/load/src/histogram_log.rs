//! Histograms of every second in HdrHistogram's log format, which its tools read and plot.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;
use std::time::{Duration, SystemTime};

use anyhow::{Context as _, anyhow};
use hdrhistogram::serialization::interval_log::{IntervalLogWriter, IntervalLogWriterBuilder, Tag};
use hdrhistogram::serialization::{V2DeflateSerializer, interval_log};

use crate::results::Results;

/// Duration that one line of the log covers (ns).
const INTERVAL_NS: u64 = 1_000_000_000;

/// Output file and serializer of a log, which must outlive the [`HistogramLog`].
pub struct LogOutput {
    file: Box<dyn Write>,
    serializer: V2DeflateSerializer,
}

impl LogOutput {
    /// Creates the log file; without a path, everything written is discarded. Fails when the file cannot be created.
    pub fn create(path: Option<&Path>) -> anyhow::Result<Self> {
        let file: Box<dyn Write> = match path {
            Some(path) => {
                let file = File::create(path);
                let file = file.with_context(|| format!("cannot make the histogram log {}", path.display()))?;
                Box::new(BufWriter::new(file))
            }
            None => Box::new(io::sink()),
        };
        Ok(Self { file, serializer: V2DeflateSerializer::new() })
    }

    /// Flushes the log file. Fails when it cannot be written.
    pub fn flush(&mut self) -> anyhow::Result<()> {
        self.file.flush().context("cannot write the histogram log")
    }
}

pub struct HistogramLog<'a> {
    writer: IntervalLogWriter<'a, 'a, Box<dyn Write>, V2DeflateSerializer>,
    /// Tag of the log lines of each class.
    tags: Vec<String>,
    /// Start of the interval that has not been written yet (ns since the start of the run).
    interval_start_ns: u64,
}

impl<'a> HistogramLog<'a> {
    /// Begins a log of classes with these tags (without commas and white space). Fails when it cannot be written.
    pub fn begin(output: &'a mut LogOutput, tags: Vec<String>, title: &str) -> anyhow::Result<Self> {
        let now = SystemTime::now();
        let writer = IntervalLogWriterBuilder::new()
            .add_comment(title)
            .add_comment("Values are nanoseconds, the column of the largest is in milliseconds.")
            .with_start_time(now)
            .with_base_time(now)
            .with_max_value_divisor(1e6)
            .begin_log_with(&mut output.file, &mut output.serializer)
            .context("cannot write the histogram log")?;
        Ok(Self { writer, tags, interval_start_ns: 0 })
    }

    /// Writes the current interval if it has ended at `since_ns` (since the start). Fails when the write fails.
    pub fn advance(&mut self, since_ns: u64, results: &mut Results) -> anyhow::Result<()> {
        if since_ns >= self.interval_start_ns + INTERVAL_NS { self.write(since_ns, results) } else { Ok(()) }
    }

    /// Writes the incomplete last interval, which ends at `since_ns`. Fails when the log cannot be written.
    pub fn finish(mut self, since_ns: u64, results: &mut Results) -> anyhow::Result<()> {
        self.write(since_ns, results)
    }

    fn write(&mut self, since_ns: u64, results: &mut Results) -> anyhow::Result<()> {
        let begun = Duration::from_nanos(self.interval_start_ns);
        let lasted = Duration::from_nanos(since_ns.saturating_sub(self.interval_start_ns));
        for (histogram, tag) in results.intervals().zip(&self.tags).filter(|(histogram, _)| !histogram.is_empty()) {
            let written = self.writer.write_histogram(histogram, begun, lasted, Tag::new(tag));
            written.map_err(|error: interval_log::IntervalLogWriterError<_>| {
                anyhow!("cannot write the histogram log: {error}")
            })?;
            histogram.reset();
        }
        self.interval_start_ns = since_ns;
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
    use crate::outstanding::SentRequest;

    /// Returns the start, duration, tag and histogram of every line of the log.
    fn read(path: &Path) -> Vec<(Duration, Duration, String, Histogram<u64>)> {
        let bytes = std::fs::read(path).unwrap();
        let entries = IntervalLogIterator::new(&bytes).map(|entry| entry.expect("a log"));
        let interval = |entry| match entry {
            LogEntry::Interval(interval) => Some(interval),
            _ => None,
        };
        let line = |interval: interval_log::IntervalLogHistogram<'_>| {
            let encoded = base64::engine::general_purpose::STANDARD.decode(interval.encoded_histogram()).unwrap();
            let histogram: Histogram<u64> = Deserializer::new().deserialize(&mut &encoded[..]).unwrap();
            let max_ms = histogram.max() as f64 / 1e6;
            assert!((interval.max() / max_ms - 1.0).abs() < 0.001, "{} against {max_ms} ms", interval.max());
            let tag = interval.tag().expect("every line has a tag").as_str().to_owned();
            (interval.start_timestamp(), interval.duration(), tag, histogram)
        };
        entries.filter_map(interval).map(line).collect()
    }

    #[test]
    fn written_log_is_read_back() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("latencies.hlog");
        let mut results = Results::new(2, 0..10_000_000_000, true).unwrap();
        let mut output = LogOutput::create(Some(&path)).unwrap();
        let tags = vec!["GET".to_owned(), "SCAN46".to_owned()];
        let mut log = HistogramLog::begin(&mut output, tags, "test").unwrap();
        let answered = |class, count: u64, results: &mut Results| {
            (1..=count)
                .for_each(|number| results.record_answer(SentRequest { due_ns: 0, class }, number * 1_000_000, None));
        };
        answered(0, 100, &mut results);
        log.advance(999_999_999, &mut results).unwrap();
        answered(0, 100, &mut results);
        answered(1, 10, &mut results);
        log.advance(1_100_000_000, &mut results).unwrap();
        answered(1, 1_000, &mut results);
        log.finish(1_500_000_000, &mut results).unwrap();
        output.flush().unwrap();

        let lines = read(&path);
        let seen: Vec<_> = lines
            .iter()
            .map(|(at, lasted, tag, of)| (at.as_millis(), lasted.as_millis(), &tag[..], of.len()))
            .collect();
        assert_eq!(seen, [(0, 1_100, "GET", 200), (0, 1_100, "SCAN46", 10), (1_100, 400, "SCAN46", 1_000)]);
        // The report must equal the sum of all intervals.
        let mut scans = lines[1].3.clone();
        scans.add(&lines[2].3).unwrap();
        assert_eq!(scans, results.classes[1].latency_ns);
    }
}
