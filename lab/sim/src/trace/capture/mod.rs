//! Captures in pcap and pcapng files, which may be compressed.
//!
//! * [`input`]: decompressed file
//! * [`pcap`], [`pcapng`]: records of the two formats
//! * [`headers`]: parser of addresses and ports
//! * [`records`]: parsed packets, with checks of their order
//! * [`writer`]: writer of a trace as a capture
//! * [`flows`]: assignment of packets to flows, and the ends of flows
//!
//! One thread reads and parses the file, and the thread that uses the trace assigns flows.

mod error;
mod flows;
mod headers;
pub mod input;
mod pcap;
mod pcapng;
mod records;
pub mod writer;

use std::path::Path;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;

use self::flows::FlowTracker;
use self::records::{CaptureReadStopReason, PacketRecordBatch};
use super::{PacketBatch, PacketSkipCounts, PacketTrace, TraceError};

use self::input::OpenedTraceFile;

pub use error::CaptureError;
pub use input::TraceFileFormat;

/// Number of packet batches that circulate between the thread that reads the file and the thread that uses the packets.
const CIRCULATING_PACKET_BATCH_COUNT: usize = 4;

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CaptureReadOptions {
    /// Time without packets after which a flow has ended (ns).
    pub flow_idle_timeout_ns: u64,
}

impl Default for CaptureReadOptions {
    /// Returns options with an idle timeout of 60 s. Applications rarely pause longer, and flows then use memory for at
    /// most one minute after their last packet.
    fn default() -> Self {
        Self { flow_idle_timeout_ns: 60_000_000_000 }
    }
}

/// Trace whose packets are read from a capture.
pub struct CaptureTrace {
    filled_batches: Receiver<PacketRecordBatch>,
    empty_batches: SyncSender<PacketRecordBatch>,
    reader_thread: Option<JoinHandle<Result<(), TraceError>>>,
    flow_tracker: FlowTracker,
    skipped_packet_counts: PacketSkipCounts,
    reordered_packet_count: u64,
}

impl CaptureTrace {
    /// Starts a thread that reads the capture. Errors during reading name `path`.
    pub fn start_reading(input: OpenedTraceFile, path: &Path, options: CaptureReadOptions) -> Self {
        let path_text = path.display().to_string();
        let (filled_batch_sender, filled_batches) = sync_channel(CIRCULATING_PACKET_BATCH_COUNT);
        let (empty_batches, empty_batch_receiver) = sync_channel(CIRCULATING_PACKET_BATCH_COUNT);
        for _ in 0..CIRCULATING_PACKET_BATCH_COUNT {
            empty_batches.send(PacketRecordBatch::default()).expect("the receiver is here");
        }
        let read_file = move || {
            let mut frame_parser = records::FrameParser::new(filled_batch_sender, empty_batch_receiver);
            let result = match input.format {
                TraceFileFormat::Pcap => pcap::read_capture(input.reader, &mut frame_parser),
                _ => pcapng::read_capture(input.reader, &mut frame_parser),
            };
            match result.and_then(|()| frame_parser.send_last_batch()) {
                Ok(()) | Err(CaptureReadStopReason::ReceiverClosed) => Ok(()),
                Err(CaptureReadStopReason::CaptureFailed(error)) => {
                    Err(TraceError::InvalidCapture { path: path_text, error })
                }
            }
        };
        let reader_thread = Some(std::thread::spawn(read_file));
        let (flow_tracker, skipped_packet_counts) =
            (FlowTracker::new(options.flow_idle_timeout_ns), PacketSkipCounts::new());
        Self {
            filled_batches,
            empty_batches,
            reader_thread,
            flow_tracker,
            skipped_packet_counts,
            reordered_packet_count: 0,
        }
    }
}

impl PacketTrace for CaptureTrace {
    fn read(&mut self, batch: &mut PacketBatch) -> Result<(), TraceError> {
        batch.clear();
        // Reading continues if all packets of the records were skipped, because an empty batch would signal the end.
        while batch.packets.is_empty() {
            let Ok(records) = self.filled_batches.recv() else {
                let reader_result =
                    self.reader_thread.take().map(|reader| reader.join().expect("the reader does not panic"));
                return reader_result.unwrap_or(Ok(()));
            };
            self.flow_tracker.assign_packets_to_flows(&records, batch);
            for (reason, packets) in records.skipped_packet_counts() {
                *self.skipped_packet_counts.entry(reason).or_default() += packets;
            }
            self.reordered_packet_count += records.reordered_packet_count;
            // The reader has perhaps ended and no longer receives batches.
            let _ = self.empty_batches.send(records);
        }
        Ok(())
    }

    fn skipped_packet_counts(&self) -> PacketSkipCounts {
        self.skipped_packet_counts.clone()
    }

    fn reordered_packet_count(&self) -> u64 {
        self.reordered_packet_count
    }

    fn end_ns(&self) -> Option<u64> {
        None
    }
}
