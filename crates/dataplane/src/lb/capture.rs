//! Capture of packets, and of the program's decisions about them, during operation (`bpf/lb/capture.h`).
//!
//! During a capture, a capturing variant of the program is attached to the device in place of the regular program.

use std::cell::RefCell;
use std::collections::HashMap;
use std::mem::offset_of;
use std::os::fd::{AsFd as _, FromRawFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use coreward_intf as intf;
use coreward_model::{ServerId, ServiceAddress};
use libbpf_rs::{MapHandle, PerfBuffer, PerfBufferBuilder, libbpf_sys};
use zerocopy::FromBytes as _;

use super::link::XdpLink;
use super::program::{CapturedService, LoadBalancerMaps};
use super::servers::{member_server_ids, resolved_mac_of_entry, server_entry};
use super::services::{read_services, services_with_names};
use super::{COUNTER_NAMES, ServiceIndex};
use crate::mac::MacAddress;

/// Options of a packet capture.
#[derive(Debug, Clone)]
pub struct PacketCaptureOptions {
    /// Pin directory of the load balancer, on a BPF file system.
    pub pin_directory: PathBuf,
    /// Service whose packets are captured.
    pub service: ServiceAddress,
    /// Maximum number of captured bytes of a frame, at least 1.
    pub max_bytes_per_packet: u32,
}

/// Captured packet with the load balancer program's decision about it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CapturedPacket {
    /// Time of CLOCK_MONOTONIC at which the packet arrived.
    pub arrival_time: Duration,
    /// Length of the frame on arrival, in bytes. At most [`PacketCaptureOptions::max_bytes_per_packet`] of them are
    /// captured.
    pub frame_length: u32,
    /// Captured bytes of the frame on arrival.
    pub received_frame: Vec<u8>,
    /// Captured bytes of the frame after the program has processed it.
    pub processed_frame: Vec<u8>,
    /// Name of the counter that counted the packet, which is one of [`COUNTER_NAMES`].
    pub outcome: &'static str,
    /// Destination of the packet.
    pub destination: CapturedPacketDestination,
}

/// Destination to which the program sent a captured packet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CapturedPacketDestination {
    /// Network stack of the load balancer's own host.
    Kernel,
    /// No destination, because the program dropped the packet.
    Dropped,
    /// Server of the service.
    Server {
        /// MAC address that the program wrote into the frame.
        mac: MacAddress,
        /// Ids of all servers that share the address.
        ids: Vec<ServerId>,
    },
    /// Another load balancer.
    LoadBalancer {
        /// Number that identifies this load balancer as the owner of a connection table.
        owner_number: u8,
    },
    /// All servers of the service, because the packet was broadcast.
    Broadcast,
    /// Destination with this MAC address, which belongs to no current server of the service and to no load balancer.
    UnknownMac(MacAddress),
}

/// Running packet capture, which ends when the value is dropped.
pub struct PacketCapture {
    options: PacketCaptureOptions,
    maps: LoadBalancerMaps,
    pinned_link: XdpLink,
    service_index: ServiceIndex,
    attached_capture: AttachedCaptureProgram,
    last_program_check: Instant,
    servers_by_mac: HashMap<MacAddress, Vec<ServerId>>,
    records: Rc<RefCell<CaptureRecords>>,
}

/// Capturing program variant that is attached to the device, and the program that it replaced.
struct AttachedCaptureProgram {
    replaced_program: OwnedFd,
    /// Id of the attached variant. If the device has another program, the daemon has attached a newer one.
    capture_program_id: u32,
    perf_buffer: PerfBuffer<'static>,
    /// Map of the perf buffer. It is held because closing it would remove the buffers that it contains.
    _perf_buffer_map: MapHandle,
}

/// Record of a packet's arrival, or of the program's decision about the packet.
struct CaptureRecord {
    header: intf::captured_packet,
    frame: Vec<u8>,
}

#[derive(Default)]
struct CaptureRecords {
    /// Records of arrived packets whose decision is not recorded yet, by CPU.
    arrivals_by_cpu: HashMap<i32, CaptureRecord>,
    arrival_decision_pairs: Vec<(CaptureRecord, CaptureRecord)>,
    lost_record_count: u64,
}

/// Size of each CPU's perf buffer in pages.
const PERF_BUFFER_PAGE_COUNT: usize = 1024;
/// Interval at which the capture checks whether the daemon has attached another program.
const CAPTURED_PROGRAM_CHECK_INTERVAL: Duration = Duration::from_millis(500);

impl PacketCapture {
    /// Starts a capture, by replacing the program pinned in `options.pin_directory` with a capturing variant. Fails
    /// when no load balancer is pinned there, it lacks the service, or another version of coreward loaded it.
    pub fn start(options: PacketCaptureOptions) -> anyhow::Result<Self> {
        ensure!(options.max_bytes_per_packet > 0, "a capture of 0 bytes of each packet: expected at least 1");
        let lb_directory = super::pin_directory::find_lb_directory(&options.pin_directory)?;
        let Some(link) = XdpLink::open_pinned(&lb_directory.join("link"))? else {
            bail!("{}: no load balancer is attached here", options.pin_directory.display());
        };
        let maps = LoadBalancerMaps::take_over(&lb_directory)?;
        let services = read_services(&maps);
        let Some(service) = services.get(&options.service).map(|service| service.index) else {
            let known_services: Vec<String> = services.keys().map(ToString::to_string).collect();
            bail!("no service {}: expected one of {}", options.service, known_services.join(", "));
        };
        let records = Rc::new(RefCell::new(CaptureRecords::default()));
        let attached_capture = AttachedCaptureProgram::new(&options, &maps, &link, service, &records)?;
        let mut capture = Self {
            options,
            maps,
            pinned_link: link,
            service_index: service,
            attached_capture,
            last_program_check: Instant::now(),
            servers_by_mac: HashMap::new(),
            records,
        };
        capture.update_servers_by_mac();
        Ok(capture)
    }

    /// Waits at most `timeout` for packets, and passes each packet to `handle_packet`. Packets of the same CPU keep
    /// their order. Fails when the load balancer was detached during the capture.
    pub fn poll(&mut self, timeout: Duration, handle_packet: &mut dyn FnMut(CapturedPacket)) -> anyhow::Result<()> {
        if self.last_program_check.elapsed() >= CAPTURED_PROGRAM_CHECK_INTERVAL {
            self.last_program_check = Instant::now();
            if self.pinned_link.program_id()? != self.attached_capture.capture_program_id {
                // The daemon may also have replaced the connection table by one of another size.
                self.maps = LoadBalancerMaps::take_over(&super::pin_directory::find_lb_directory(
                    &self.options.pin_directory,
                )?)?;
                self.attached_capture = AttachedCaptureProgram::new(
                    &self.options,
                    &self.maps,
                    &self.pinned_link,
                    self.service_index,
                    &self.records,
                )?;
            }
        }
        match self.attached_capture.perf_buffer.poll(timeout) {
            // If a signal interrupted the wait, the caller handles it.
            Err(error) if error.kind() == libbpf_rs::ErrorKind::Interrupted => {}
            poll_result => poll_result.context("reading what was captured")?,
        }
        let arrival_decision_pairs = std::mem::take(&mut self.records.borrow_mut().arrival_decision_pairs);
        for (arrival, decision) in arrival_decision_pairs {
            handle_packet(CapturedPacket {
                arrival_time: Duration::from_nanos(arrival.header.time_ns),
                frame_length: arrival.header.length,
                outcome: COUNTER_NAMES.get(decision.header.outcome as usize).copied().unwrap_or("unknown"),
                destination: self.classify_destination(decision.header.action, &decision.frame),
                received_frame: arrival.frame,
                processed_frame: decision.frame,
            });
        }
        Ok(())
    }

    /// Returns the number of records that were lost because a perf buffer was full.
    pub fn lost_record_count(&self) -> u64 {
        self.records.borrow().lost_record_count
    }

    fn classify_destination(&mut self, action: u32, sent_bytes: &[u8]) -> CapturedPacketDestination {
        match action {
            libbpf_sys::XDP_PASS => return CapturedPacketDestination::Kernel,
            libbpf_sys::XDP_TX => {}
            _ => return CapturedPacketDestination::Dropped,
        }
        let Some(mac) = sent_bytes.first_chunk().map(|octets| MacAddress(*octets)) else {
            return CapturedPacketDestination::Dropped;
        };
        if mac.0 == [0xff; 6] {
            return CapturedPacketDestination::Broadcast;
        }
        if !self.servers_by_mac.contains_key(&mac) {
            self.update_servers_by_mac();
        }
        if let Some(ids) = self.servers_by_mac.get(&mac) {
            return CapturedPacketDestination::Server { mac, ids: ids.clone() };
        }
        match self.find_owner_by_mac(mac) {
            Some(owner_number) => CapturedPacketDestination::LoadBalancer { owner_number },
            None => CapturedPacketDestination::UnknownMac(mac),
        }
    }

    fn update_servers_by_mac(&mut self) {
        self.servers_by_mac.clear();
        for server in member_server_ids(&self.maps, self.service_index) {
            if let Some(mac) = resolved_mac_of_entry(server_entry(&self.maps, self.service_index, server)) {
                self.servers_by_mac.entry(mac).or_default().push(server);
            }
        }
    }

    fn find_owner_by_mac(&self, mac: MacAddress) -> Option<u8> {
        let owner_entry_offset =
            |owner: u8| offset_of!(intf::lb_state, owners) + usize::from(owner) * size_of::<intf::server_entry>();
        (0..intf::MAX_OWNERS as u8)
            .find(|owner| resolved_mac_of_entry(self.maps.state.load(owner_entry_offset(*owner))) == Some(mac))
    }
}

impl AttachedCaptureProgram {
    fn new(
        options: &PacketCaptureOptions,
        maps: &LoadBalancerMaps,
        link: &XdpLink,
        service: ServiceIndex,
        records: &Rc<RefCell<CaptureRecords>>,
    ) -> anyhow::Result<Self> {
        let vip = options.service.vip_and_port;
        let replaced_program = program_fd_by_id(link.program_id()?)?;
        let vip_protocol = options.service.protocol;
        let captured_service = CapturedService {
            vip,
            protocol: vip_protocol,
            service_index: service,
            max_bytes_per_packet: options.max_bytes_per_packet,
        };
        let (capturing_program, perf_buffer_map) =
            maps.load_capturing_program(replaced_program.as_fd(), &captured_service)?;
        let (sample_records, loss_records) = (records.clone(), records.clone());
        let perf_buffer = PerfBufferBuilder::new(&perf_buffer_map)
            .pages(PERF_BUFFER_PAGE_COUNT)
            .sample_cb(move |cpu, data: &[u8]| sample_records.borrow_mut().add_record(cpu, data))
            .lost_cb(move |_, count| loss_records.borrow_mut().lost_record_count += count)
            .build()
            .context("the perf buffer")?;
        link.replace_program(capturing_program.as_fd()).context("replacing the program at the device")?;
        Ok(Self {
            replaced_program,
            capture_program_id: link.program_id()?,
            perf_buffer,
            _perf_buffer_map: perf_buffer_map,
        })
    }
}

/// Restores the replaced program unless the daemon has attached another one.
impl Drop for PacketCapture {
    fn drop(&mut self) {
        let restore_program = || -> anyhow::Result<()> {
            if self.pinned_link.program_id()? == self.attached_capture.capture_program_id {
                self.pinned_link.replace_program(self.attached_capture.replaced_program.as_fd())?;
            }
            Ok(())
        };
        if let Err(error) = restore_program() {
            tracing::warn!(
                event = "program-not-restored",
                error = format!("{error:#}"),
                "the capture cannot replace its slower XDP program by the normal one: restart the load balancer"
            );
        }
    }
}

impl CaptureRecords {
    /// Stores a record from the perf buffer. `data` is a `struct captured_packet`, followed by bytes of the packet.
    fn add_record(&mut self, cpu: i32, data: &[u8]) {
        let Ok((header, frame_bytes)) = intf::captured_packet::read_from_prefix(data) else { return };
        let frame = frame_bytes[..frame_bytes.len().min(header.captured_length as usize)].to_vec();
        let record = CaptureRecord { header, frame };
        if header.action == intf::CAPTURE_ARRIVED {
            self.arrivals_by_cpu.insert(cpu, record);
        } else if let Some(arrival) = self.arrivals_by_cpu.remove(&cpu)
            && arrival.header.sequence == header.sequence
        {
            self.arrival_decision_pairs.push((arrival, record));
        }
    }
}

fn program_fd_by_id(id: u32) -> anyhow::Result<OwnedFd> {
    // SAFETY: the function takes no pointer.
    let result = unsafe { libbpf_sys::bpf_prog_get_fd_by_id(id) };
    ensure!(result >= 0, "program {id}: {}", std::io::Error::from_raw_os_error(-result));
    // SAFETY: a new descriptor that nothing else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(result) })
}

/// Returns the services of the load balancer that is pinned in `pin_directory`, with their configured names. Fails when
/// no load balancer is pinned there.
pub fn pinned_services_with_names(pin_directory: &Path) -> anyhow::Result<Vec<(ServiceAddress, String)>> {
    let maps = LoadBalancerMaps::take_over(&super::pin_directory::find_lb_directory(pin_directory)?)?;
    Ok(services_with_names(&maps))
}
