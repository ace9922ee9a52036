//! Batches of parsed packets, sorted by time, and counts of the packets that were skipped.

use std::sync::mpsc::{Receiver, SyncSender};

use super::error::{CaptureError, REORDER_TOLERANCE_NS};
use super::headers::{self, AddressPair, CaptureLinkType, FLAG_IPV6_ADDRESSES, PacketSkipReason, ParsedHeaders};

const PACKETS_PER_BATCH: usize = 32_768;

/// Number of packets cut off before their ports above which reading stops if they are the majority.
const MAX_TOLERATED_CUT_OFF_PACKETS: u64 = 100;

/// Reason why reading stopped before the end of the file.
#[derive(Debug)]
pub enum CaptureReadStopReason {
    /// The capture file is invalid.
    CaptureFailed(CaptureError),
    /// The thread that uses the packets has closed its end of the channel.
    ReceiverClosed,
}

impl From<CaptureError> for CaptureReadStopReason {
    fn from(error: CaptureError) -> Self {
        CaptureReadStopReason::CaptureFailed(error)
    }
}

/// Packet whose headers have been parsed.
#[derive(Debug, Clone, Copy)]
pub struct PacketRecord {
    /// Time since the first packet of the file (ns).
    pub time_ns: u64,
    /// Source and destination address of an IPv4 packet, or the index of an IPv6 packet in
    /// [`PacketRecordBatch::ipv6_addresses`].
    pub ipv4_addresses_or_ipv6_index: u64,
    /// Source and destination ports, with the source port in the upper 16 bits.
    pub port_pair: u32,
    /// Length of the packet on the wire (bytes), at most 65,535.
    pub wire_bytes: u16,
    /// IP protocol number, which is 6 (TCP) or 17 (UDP).
    pub ip_protocol: u8,
    /// Combination of flags such as [`FLAG_IPV6_ADDRESSES`].
    pub packet_flags: u8,
}

/// Batch of parsed packets, with counts of the packets that were skipped between them.
#[derive(Debug, Default)]
pub struct PacketRecordBatch {
    pub packets: Vec<PacketRecord>,
    /// Source and destination addresses of the IPv6 packets in the batch.
    pub ipv6_addresses: Vec<[u8; 32]>,
    /// Number of skipped packets for each reason.
    skipped_packet_counts: [u64; PacketSkipReason::COUNT],
    /// Number of packets whose time stamp is earlier than that of the packet before, by at most `REORDER_TOLERANCE_NS`.
    pub reordered_packet_count: u64,
}

impl PacketRecordBatch {
    /// Returns the reasons for which packets were skipped, each with the number of these packets.
    pub fn skipped_packet_counts(&self) -> impl Iterator<Item = (&'static str, u64)> {
        PacketSkipReason::ALL
            .into_iter()
            .zip(self.skipped_packet_counts)
            .filter(|(_, count)| *count > 0)
            .map(|(reason, count)| (reason.name(), count))
    }

    fn clear(&mut self) {
        self.packets.clear();
        self.ipv6_addresses.clear();
        self.skipped_packet_counts = [0; PacketSkipReason::COUNT];
        self.reordered_packet_count = 0;
    }
}

/// Packet as stored in a capture file.
pub struct CapturedFrame<'a> {
    /// Time stamp of the packet (ns since 1970).
    pub time_ns: u64,
    pub wire_bytes: u32,
    pub data: &'a [u8],
}

/// Parser of captured frames, which sends batches of packet records to the thread that uses the packets.
pub struct FrameParser {
    filled_batches: SyncSender<PacketRecordBatch>,
    empty_batches: Receiver<PacketRecordBatch>,
    record_batch: PacketRecordBatch,
    first_packet_ns: Option<u64>,
    latest_packet_ns: u64,
    /// Number of packets that have been read from the file so far.
    packet_count: u64,
    recorded_packet_count: u64,
    cut_off_packet_count: u64,
    first_cut_off_error: Option<CaptureError>,
}

impl FrameParser {
    pub fn new(filled_batches: SyncSender<PacketRecordBatch>, empty_batches: Receiver<PacketRecordBatch>) -> Self {
        Self {
            filled_batches,
            empty_batches,
            record_batch: PacketRecordBatch::default(),
            first_packet_ns: None,
            latest_packet_ns: 0,
            packet_count: 0,
            recorded_packet_count: 0,
            cut_off_packet_count: 0,
            first_cut_off_error: None,
        }
    }

    pub fn packet_count(&self) -> u64 {
        self.packet_count
    }

    /// Returns the error for a file that ends in the middle of a packet, after the packets read so far.
    pub fn build_truncation_error(&self) -> CaptureError {
        let last_ns = self.first_packet_ns.map_or(0, |first_ns| self.latest_packet_ns - first_ns);
        CaptureError::TruncatedFile {
            packet_number: self.packet_count + 1,
            packets_before: self.packet_count,
            last_s: last_ns as f64 / 1e9,
        }
    }

    #[inline]
    pub fn record_frame(
        &mut self,
        link_type: CaptureLinkType,
        frame: &CapturedFrame<'_>,
    ) -> Result<(), CaptureReadStopReason> {
        self.packet_count += 1;
        let time_ns = self.compute_ordered_time_ns(frame.time_ns)?;
        match headers::parse_headers(link_type, frame.data) {
            Ok(parsed_headers) => self.append_record(time_ns, frame.wire_bytes, &parsed_headers),
            Err(PacketSkipReason::CutOff) => self.record_cut_off_packet(link_type, frame)?,
            Err(reason) => self.record_batch.skipped_packet_counts[reason as usize] += 1,
        }
        if self.record_batch.packets.len() == PACKETS_PER_BATCH { self.send_batch() } else { Ok(()) }
    }

    /// Counts a packet that is skipped for the given reason.
    pub fn count_skipped_packet(&mut self, reason: PacketSkipReason) {
        self.packet_count += 1;
        self.record_batch.skipped_packet_counts[reason as usize] += 1;
    }

    /// Returns the packet's time since the first packet (ns), but at least the time of the packet before. Fails when
    /// the time stamp is more than [`REORDER_TOLERANCE_NS`] earlier than a previous one.
    #[inline]
    fn compute_ordered_time_ns(&mut self, time_ns: u64) -> Result<u64, CaptureReadStopReason> {
        let first_ns = *self.first_packet_ns.get_or_insert(time_ns);
        if time_ns < self.latest_packet_ns {
            if self.latest_packet_ns - time_ns > REORDER_TOLERANCE_NS {
                let (time_s, previous_s) = (time_ns as f64 / 1e9, self.latest_packet_ns as f64 / 1e9);
                return Err(
                    CaptureError::UnsortedPacketTimes { packet_number: self.packet_count, time_s, previous_s }.into()
                );
            }
            self.record_batch.reordered_packet_count += 1;
        } else {
            self.latest_packet_ns = time_ns;
        }
        Ok(self.latest_packet_ns - first_ns)
    }

    #[inline]
    fn append_record(&mut self, time_ns: u64, length: u32, parsed_headers: &ParsedHeaders) {
        let (addresses, family_flag) = match parsed_headers.addresses {
            AddressPair::V4(address_pair) => (address_pair, 0),
            AddressPair::V6(address_pair) => {
                self.record_batch.ipv6_addresses.push(address_pair);
                (self.record_batch.ipv6_addresses.len() as u64 - 1, FLAG_IPV6_ADDRESSES)
            }
        };
        self.recorded_packet_count += 1;
        self.record_batch.packets.push(PacketRecord {
            time_ns,
            ipv4_addresses_or_ipv6_index: addresses,
            port_pair: parsed_headers.port_pair,
            wire_bytes: length.min(u32::from(u16::MAX)) as u16,
            ip_protocol: parsed_headers.ip_protocol,
            packet_flags: parsed_headers.connection_flags | family_flag,
        });
    }

    fn record_cut_off_packet(
        &mut self,
        link_type: CaptureLinkType,
        frame: &CapturedFrame<'_>,
    ) -> Result<(), CaptureReadStopReason> {
        self.cut_off_packet_count += 1;
        self.record_batch.skipped_packet_counts[PacketSkipReason::CutOff as usize] += 1;
        self.first_cut_off_error.get_or_insert_with(|| CaptureError::SnapLengthTooShort {
            packet_number: self.packet_count,
            captured_bytes: frame.data.len() as u32,
            wire_bytes: frame.wire_bytes,
            min_snap_length: link_type.min_snap_length(),
        });
        if self.cut_off_packet_count > MAX_TOLERATED_CUT_OFF_PACKETS {
            self.check_cut_off_packet_count()
        } else {
            Ok(())
        }
    }

    /// Fails if most packets so far have been cut off before their ports. A few packets with long chains of IPv6
    /// headers are merely skipped.
    fn check_cut_off_packet_count(&mut self) -> Result<(), CaptureReadStopReason> {
        if self.cut_off_packet_count > self.recorded_packet_count
            && let Some(error) = self.first_cut_off_error.take()
        {
            return Err(error.into());
        }
        Ok(())
    }

    fn send_batch(&mut self) -> Result<(), CaptureReadStopReason> {
        let mut empty_batch = self.empty_batches.recv().map_err(|_| CaptureReadStopReason::ReceiverClosed)?;
        empty_batch.clear();
        let full_batch = std::mem::replace(&mut self.record_batch, empty_batch);
        self.filled_batches.send(full_batch).map_err(|_| CaptureReadStopReason::ReceiverClosed)
    }

    /// Sends the last batch at the end of the file, after a check that enough packets have their ports.
    pub fn send_last_batch(mut self) -> Result<(), CaptureReadStopReason> {
        self.check_cut_off_packet_count()?;
        self.send_batch()
    }
}
