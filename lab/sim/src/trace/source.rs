//! Sources from which a trace can be read or generated.

use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use super::arrivals::ArrivalLogTrace;
use super::burst_trace::{BurstTrace, BurstTrafficSettings};
use super::campus::{CampusTrace, CampusTrafficSettings};
use super::capture::{CaptureReadOptions, CaptureTrace, TraceFileFormat, input};
use super::trace_overlay::{TraceOverlay, TraceSlice};
use super::traffic_settings::TrafficSettingError;
use super::{PacketBatch, PacketTrace, TraceError};

/// Source of a trace, as selected by `--trace`.
#[derive(Debug, Clone, PartialEq)]
pub enum TraceSource {
    Campus(CampusTrafficSettings),
    Burst(BurstTrafficSettings),
    /// File that contains a capture or an arrival log.
    File(PathBuf),
}

/// Reason why a text is not a valid source of a trace.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum TraceSourceError {
    /// The settings of a generator are invalid.
    #[error(transparent)]
    InvalidSetting(#[from] TrafficSettingError),
    /// The text is empty.
    #[error("a trace without a name: expected a file, or campus[:seed=1,flows=3000,seconds=10]")]
    EmptyText,
}

impl Default for TraceSource {
    fn default() -> Self {
        TraceSource::Campus(CampusTrafficSettings::default())
    }
}

impl FromStr for TraceSource {
    type Err = TraceSourceError;

    fn from_str(text: &str) -> Result<Self, TraceSourceError> {
        match text.split_once(':') {
            _ if text.is_empty() => Err(TraceSourceError::EmptyText),
            Some(("campus", settings)) => Ok(TraceSource::Campus(settings.parse()?)),
            None if text == "campus" => Ok(TraceSource::default()),
            Some(("burst", settings)) => Ok(TraceSource::Burst(settings.parse()?)),
            None if text == "burst" => Ok(TraceSource::Burst(BurstTrafficSettings::default())),
            _ => Ok(TraceSource::File(text.into())),
        }
    }
}

impl TraceSource {
    /// Returns whether each seed of a simulation has its own traffic.
    pub fn varies_with_seed(&self) -> bool {
        matches!(
            self,
            TraceSource::Campus(CampusTrafficSettings { seed: None, .. })
                | TraceSource::Burst(BurstTrafficSettings { seed: None, .. })
        )
    }

    /// Opens the traffic, which depends on `seed` only if [`TraceSource::varies_with_seed`] returns true. Fails when
    /// the file cannot be read or has an unknown format.
    pub fn open_trace(&self, seed: u64, options: CaptureReadOptions) -> Result<Box<dyn PacketTrace>, TraceError> {
        match self {
            TraceSource::Campus(campus) => Ok(Box::new(CampusTrace::new(campus, seed))),
            TraceSource::Burst(burst) => Ok(Box::new(BurstTrace::new(burst, seed))),
            TraceSource::File(path) => open_trace_from_file(path, options),
        }
    }

    /// Opens an overlay of several copies of the traffic (see [`super::trace_overlay`]). A file is read once to find
    /// its end, and then once for each copy, or twice for a copy that starts in its middle.
    pub fn open_overlaid_copies(
        &self,
        seed: u64,
        copies: u32,
        options: CaptureReadOptions,
    ) -> Result<Box<dyn PacketTrace>, TraceError> {
        if copies == 1 {
            return self.open_trace(seed, options);
        }
        let mut trace_copies: Vec<(Box<dyn PacketTrace>, u64, u32)> = Vec::new();
        if let TraceSource::Campus(campus) = self {
            for copy_number in 0..copies {
                // These seeds are far from those that a user chooses.
                let seed = campus.seed.unwrap_or(seed).wrapping_add(u64::from(copy_number) << 32);
                let campus = CampusTrafficSettings { seed: Some(seed), ..*campus };
                trace_copies.push((Box::new(CampusTrace::new(&campus, seed)), 0, copy_number));
            }
            return Ok(Box::new(TraceOverlay::new(trace_copies)));
        }
        let duration_ns = self.measure_duration_ns(seed, options)?;
        for copy_number in 0..copies {
            let start_ns = duration_ns * u64::from(copy_number) / u64::from(copies);
            trace_copies.push((
                Box::new(TraceSlice::new(self.open_trace(seed, options)?, start_ns, duration_ns)),
                0,
                copy_number,
            ));
            if start_ns > 0 {
                trace_copies.push((
                    Box::new(TraceSlice::new(self.open_trace(seed, options)?, 0, start_ns)),
                    duration_ns - start_ns,
                    copy_number,
                ));
            }
        }
        Ok(Box::new(TraceOverlay::new(trace_copies)))
    }

    /// Returns the time just after the trace's last packet (ns since the start of the trace).
    fn measure_duration_ns(&self, seed: u64, options: CaptureReadOptions) -> Result<u64, TraceError> {
        let mut trace = self.open_trace(seed, options)?;
        if let Some(end_ns) = trace.end_ns() {
            return Ok(end_ns);
        }
        let (mut batch, mut last_ns) = (PacketBatch::default(), 0);
        loop {
            trace.read(&mut batch)?;
            let Some(last_packet) = batch.packets.last() else { return Ok(last_ns + 1) };
            last_ns = last_packet.time_ns;
        }
    }
}

fn open_trace_from_file(path: &Path, options: CaptureReadOptions) -> Result<Box<dyn PacketTrace>, TraceError> {
    let mut input = input::open_trace_file(path)?;
    if input.format != TraceFileFormat::ArrivalLog {
        return Ok(Box::new(CaptureTrace::start_reading(input, path, options)));
    }
    let path_text = path.display().to_string();
    let mut text = String::new();
    let result = input.reader.read_to_string(&mut text);
    result.map_err(|error| TraceError::UnreadableFile { path: path_text.clone(), error })?;
    let arrival_log = text.parse().map_err(|error| TraceError::InvalidArrivalLog { path: path_text.clone(), error })?;
    Ok(Box::new(ArrivalLogTrace::new(arrival_log, &path_text)?))
}
