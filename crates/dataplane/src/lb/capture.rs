//! `bpf/lb/capture.h`: captures packets and their decisions during operation.
//!
//! During a capture, a variant of the program is attached to the device in place of the program that is in operation.

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
use super::program::{CapturedService, Maps};
use super::servers::{members, resolved_mac, server_entry};
use super::services::{read_services, service_names};
use super::{COUNTER_NAMES, ServiceIndex, program};
use crate::mac::MacAddress;

/// Options of a packet capture.
#[derive(Debug, Clone)]
pub struct Options {
    /// The load balancer's pin directory, below a BPF file system.
    pub pin_directory: PathBuf,
    /// Service whose packets are captured.
    pub service: ServiceAddress,
    /// Maximum number of captured bytes of a frame, at least 1.
    pub capture_length: u32,
}

/// Captured packet, with the program's decision about it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CapturedPacket {
    /// Time at which the packet arrived, by CLOCK_MONOTONIC.
    pub time: Duration,
    /// Length of the arrived frame in bytes. Only the first `max_captured_bytes` bytes of a longer frame are captured.
    pub length: u32,
    /// Captured bytes of the frame as it arrived.
    pub frame_in: Vec<u8>,
    /// Captured bytes of the frame as the program left it.
    pub frame_out: Vec<u8>,
    /// Name of the counter that counted the packet: one of [`COUNTER_NAMES`].
    pub outcome: &'static str,
    /// Destination of the packet.
    pub destination: Destination,
}

/// Destination of a captured packet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Destination {
    /// Network stack of the load balancer's own host.
    Kernel,
    /// No destination: the program dropped the packet.
    Dropped,
    /// Server with this MAC address; several ids if several servers share the address.
    Server(MacAddress, Vec<ServerId>),
    /// Load balancer with this owner number.
    LoadBalancer(u8),
    /// All servers: the packet was broadcast.
    AllServers,
    /// Unknown destination: no server of the service has this MAC address (any more).
    Unknown(MacAddress),
}

/// Running capture of packets; dropping the value ends the capture.
pub struct Capture {
    options: Options,
    maps: Maps,
    link: XdpLink,
    service: ServiceIndex,
    attached: AttachedCapture,
    last_check: Instant,
    servers: HashMap<MacAddress, Vec<ServerId>>,
    records: Rc<RefCell<CaptureRecords>>,
}

/// Capturing variant attached to the device, and the program that it replaced.
struct AttachedCapture {
    replaced_program: OwnedFd,
    /// Id of the attached variant. If the device has a program of another id, the daemon has attached a newer one.
    program_id: u32,
    buffer: PerfBuffer<'static>,
    /// Map of the perf buffer, held because closing it would remove the buffers that it inserted.
    _captured: MapHandle,
}

/// Records from the perf buffer.
#[derive(Default)]
struct CaptureRecords {
    /// Packets whose arrival was recorded but not yet the decision about them, by CPU.
    undecided_by_cpu: HashMap<i32, (intf::captured_packet, Vec<u8>)>,
    complete_records: Vec<(intf::captured_packet, Vec<u8>, intf::captured_packet, Vec<u8>)>,
    lost_records: u64,
}

/// Size of each CPU's perf buffer in pages.
const BUFFER_PAGE_COUNT: usize = 1024;
/// Interval at which the capture checks whether the daemon has attached another program.
const CHECK_INTERVAL: Duration = Duration::from_millis(500);

impl Capture {
    /// Replaces the program of the load balancer in `pin_directory` by the capturing variant. Fails when no load
    /// balancer is pinned there, or the load balancer lacks the service or was loaded by another version of coreward.
    pub fn start(options: Options) -> anyhow::Result<Self> {
        ensure!(options.capture_length > 0, "a capture of 0 bytes of each packet: expected at least 1");
        let pins = program::existing_pin_directory(&options.pin_directory)?;
        let Some(link) = XdpLink::open_pinned(&pins.join("link"))? else {
            bail!("{}: no load balancer is attached here", options.pin_directory.display());
        };
        let maps = Maps::take_over(&pins)?;
        let services = read_services(&maps);
        let Some(service) = services.get(&options.service).map(|service| service.index) else {
            let known: Vec<String> = services.keys().map(ToString::to_string).collect();
            bail!("no service {}: expected one of {}", options.service, known.join(", "));
        };
        let records = Rc::new(RefCell::new(CaptureRecords::default()));
        let attached = AttachedCapture::new(&options, &maps, &link, service, &records)?;
        let mut capture = Self {
            options,
            maps,
            link,
            service,
            attached,
            last_check: Instant::now(),
            servers: HashMap::new(),
            records,
        };
        capture.read_servers();
        Ok(capture)
    }

    /// Waits for packets, at most `timeout`, and passes each to `sink`. The packets of one CPU keep their order. Fails
    /// when the load balancer was detached during the capture.
    pub fn poll(&mut self, timeout: Duration, sink: &mut dyn FnMut(CapturedPacket)) -> anyhow::Result<()> {
        if self.last_check.elapsed() >= CHECK_INTERVAL {
            self.last_check = Instant::now();
            if self.link.program_id()? != self.attached.program_id {
                // The daemon may have replaced the connection table by one of another size.
                self.maps = Maps::take_over(&program::existing_pin_directory(&self.options.pin_directory)?)?;
                self.attached =
                    AttachedCapture::new(&self.options, &self.maps, &self.link, self.service, &self.records)?;
            }
        }
        match self.attached.buffer.poll(timeout) {
            // A signal interrupted the wait: the caller handles it.
            Err(error) if error.kind() == libbpf_rs::ErrorKind::Interrupted => {}
            outcome => outcome.context("reading what was captured")?,
        }
        let whole = std::mem::take(&mut self.records.borrow_mut().complete_records);
        for (came, arrived, decided, left) in whole {
            let destination = self.destination(decided.action, &left);
            sink(CapturedPacket {
                time: Duration::from_nanos(came.time_ns),
                length: came.length,
                outcome: COUNTER_NAMES.get(decided.outcome as usize).copied().unwrap_or("unknown"),
                destination,
                frame_in: arrived,
                frame_out: left,
            });
        }
        Ok(())
    }

    /// Returns the number of records that were lost because the perf buffer was full.
    pub fn lost_records(&self) -> u64 {
        self.records.borrow().lost_records
    }

    fn destination(&mut self, action: u32, left: &[u8]) -> Destination {
        match action {
            libbpf_sys::XDP_PASS => return Destination::Kernel,
            libbpf_sys::XDP_TX => {}
            _ => return Destination::Dropped,
        }
        let Some(mac) = left.first_chunk().map(|octets| MacAddress(*octets)) else { return Destination::Dropped };
        if mac.0 == [0xff; 6] {
            return Destination::AllServers;
        }
        if !self.servers.contains_key(&mac) {
            self.read_servers();
        }
        if let Some(ids) = self.servers.get(&mac) {
            return Destination::Server(mac, ids.clone());
        }
        match self.owner_with(mac) {
            Some(owner) => Destination::LoadBalancer(owner),
            None => Destination::Unknown(mac),
        }
    }

    fn read_servers(&mut self) {
        self.servers.clear();
        for server in members(&self.maps, self.service) {
            if let Some(mac) = resolved_mac(server_entry(&self.maps, self.service, server)) {
                self.servers.entry(mac).or_default().push(server);
            }
        }
    }

    fn owner_with(&self, mac: MacAddress) -> Option<u8> {
        let at = |owner: u8| offset_of!(intf::lb_state, owners) + usize::from(owner) * size_of::<intf::server_entry>();
        (0..intf::MAX_OWNERS as u8).find(|owner| resolved_mac(self.maps.state.load(at(*owner))) == Some(mac))
    }
}

impl AttachedCapture {
    fn new(
        options: &Options,
        maps: &Maps,
        link: &XdpLink,
        service: ServiceIndex,
        records: &Rc<RefCell<CaptureRecords>>,
    ) -> anyhow::Result<Self> {
        let vip = options.service.socket;
        let replaced_program = program_descriptor(link.program_id()?)?;
        let protocol = options.service.protocol;
        let watched = CapturedService { vip, protocol, service, length: options.capture_length };
        let (variant, captured) = maps.load_capturing(replaced_program.as_fd(), &watched)?;
        let (on_record, on_loss) = (records.clone(), records.clone());
        let buffer = PerfBufferBuilder::new(&captured)
            .pages(BUFFER_PAGE_COUNT)
            .sample_cb(move |cpu, data: &[u8]| on_record.borrow_mut().read_record(cpu, data))
            .lost_cb(move |_, count| on_loss.borrow_mut().lost_records += count)
            .build()
            .context("the perf buffer")?;
        link.replace(variant.as_fd()).context("replacing the program at the device")?;
        Ok(Self { replaced_program, program_id: link.program_id()?, buffer, _captured: captured })
    }
}

/// Restores the replaced program, unless the daemon has attached another one.
impl Drop for Capture {
    fn drop(&mut self) {
        let put_back = || -> anyhow::Result<()> {
            if self.link.program_id()? == self.attached.program_id {
                self.link.replace(self.attached.replaced_program.as_fd())?;
            }
            Ok(())
        };
        if let Err(error) = put_back() {
            tracing::warn!(
                event = "program-not-restored",
                error = format!("{error:#}"),
                "the capture cannot restore the load balancer's program: restart the load balancer"
            );
        }
    }
}

impl CaptureRecords {
    /// Stores one record of the perf buffer: a `struct captured_packet`, followed by bytes of the packet.
    fn read_record(&mut self, cpu: i32, data: &[u8]) {
        let Ok((packet, rest)) = intf::captured_packet::read_from_prefix(data) else { return };
        let bytes = rest[..rest.len().min(packet.captured_length as usize)].to_vec();
        if packet.action == intf::CAPTURE_ARRIVED {
            self.undecided_by_cpu.insert(cpu, (packet, bytes));
        } else if let Some((came, arrived)) = self.undecided_by_cpu.remove(&cpu)
            && came.sequence == packet.sequence
        {
            self.complete_records.push((came, arrived, packet, bytes));
        }
    }
}

fn program_descriptor(id: u32) -> anyhow::Result<OwnedFd> {
    // SAFETY: the function takes no pointer.
    let result = unsafe { libbpf_sys::bpf_prog_get_fd_by_id(id) };
    ensure!(result >= 0, "program {id}: {}", std::io::Error::from_raw_os_error(-result));
    // SAFETY: a new descriptor that nothing else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(result) })
}

/// Returns the services of the load balancer in `pin_directory`, with their configured names. Fails when no load
/// balancer is pinned there.
pub fn services(pin_directory: &Path) -> anyhow::Result<Vec<(ServiceAddress, String)>> {
    let maps = Maps::take_over(&program::existing_pin_directory(pin_directory)?)?;
    Ok(service_names(&maps))
}
