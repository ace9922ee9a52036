//! Loads `bpf/lb/lb.bpf.c` at the load balancer's device and manages the state that it shares with user space.
//!
//! The program's maps are pinned below `lb/` in the configured directory, so that they outlive the process:
//!
//! ```text
//! lb/state                 struct lb_state: keys, services, offsets of their tables
//! lb/servers               address of every server
//! lb/tunnels               outer headers of servers that packets are encapsulated for
//! lb/membership            servers of each service, and the eligible ones
//! lb/placement_memory      the tables of all services
//! lb/recent_placements     servers of recent new connections, for retransmitted SYNs
//! lb/flow_table            connections without a cookie
//! lb/lb_stamped_servers    source addresses and clocks of servers, for `timestamps = "lb"`
//! lb/lb_stamped_offsets    clocks of connections whose server has no shared clock
//! lb/fragments             destinations of later fragments
//! lb/connections           the connection table of stateful services
//! lb/connection_stacks     free slots of the connection table
//! lb/recent_connections    entries of recent SYNs, for their retransmissions
//! lb/counters
//! lb/server_traffic        traffic to each server
//! lb/link                  the program at the device
//! ```

mod buddy_allocator;
pub mod capture;
mod connection_memory;
pub mod connections;
mod counters;
pub(crate) mod device;
mod lb_stamping;
pub(crate) mod link;
mod pin_directory;
mod pinned_state;
mod placement;
mod placement_memory;
mod program;
mod program_loading;
mod program_variant;
mod servers;
mod services;
mod tunnels;
mod vlans;

use std::collections::{BTreeMap, BTreeSet};
use std::mem::offset_of;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::PathBuf;

use anyhow::Context as _;
use coreward_intf as intf;
use coreward_model::connection_table::ConnectionTableSize;
use coreward_model::cookie::{CookieKey, FleetCookieKeys};
use coreward_model::vlan::Vlan;
use coreward_model::{ServerId, ServiceAddress};

pub use coreward_intf::{LB_COUNTER_NAMES as COUNTER_NAMES, LB_EVENT_NAMES as EVENT_NAMES};
pub use counters::{LB_COUNTER_COUNT, LB_EVENT_KIND_COUNT, PacketCounters};
pub(crate) use device::interface_mac;
pub use lb_stamping::{ServerClockMeasurements, ServerClockState, ServerIdTooLarge, StampedPacketCounts};
pub use pinned_state::{PinnedServers, find_takeover_problem, pinned_program_id};
pub use placement_memory::PlacementTableError;
pub use services::ServiceSettingsError;
pub use tunnels::{OuterSourceAddresses, ServerTunnel};

use crate::mac::MacAddress;
use crate::rcu::{GracePeriodTicket, GracePeriodWaiter};
use connections::ConnectionTableOccupancy;
use link::XdpLink;
use program::{BpfMapSizes, LoadBalancerMaps};
use program_loading::LoadedLbProgram;
use program_variant::ProgramVariant;
use services::ForwardedService;

/// Limit of a packet rate, which a token bucket enforces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PacketRateLimit {
    /// Sustained rate in packets per second, at least 1.
    pub packets_per_second: u32,
    /// Number of packets that may pass at once, at least 1.
    pub burst_packets: u32,
}

/// Rate limits of packets that are broadcast for the same reason (`bpf/lb/broadcast.h`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BroadcastRateLimits {
    /// Limit of packets from one source address. Several source addresses may share a token bucket.
    pub source_limit: PacketRateLimit,
    /// Limit of packets to one service.
    pub service_limit: PacketRateLimit,
    /// Limit of all packets that this load balancer broadcasts for this reason.
    pub total_limit: PacketRateLimit,
}

/// Rate limits of broadcast packets, by the reason of the broadcast (`enum limited_kind`).
pub type BroadcastLimitsByKind = [BroadcastRateLimits; intf::LIMITED_KIND_COUNT as usize];

impl BroadcastRateLimits {
    const fn new(per_source: (u32, u32), per_service: (u32, u32), total: (u32, u32)) -> Self {
        const fn new_packet_rate_limit((per_second, burst): (u32, u32)) -> PacketRateLimit {
            PacketRateLimit { packets_per_second: per_second, burst_packets: burst }
        }
        Self {
            source_limit: new_packet_rate_limit(per_source),
            service_limit: new_packet_rate_limit(per_service),
            total_limit: new_packet_rate_limit(total),
        }
    }

    /// Returns rate limits that all equal `rate`.
    pub const fn with_equal_rates(rate: PacketRateLimit) -> Self {
        Self { source_limit: rate, service_limit: rate, total_limit: rate }
    }

    /// Default limits, which allow 80,000 broadcast packets per second in total. One source may use at most a quarter
    /// of a service's rate. ICMP errors without a cookie have the largest limit per service, because forged ones from
    /// any source look like genuine ones. Packets of a lost connection table have high limits, because all of its
    /// connections cause broadcasts at about the same time.
    pub const DEFAULT_BROADCAST_LIMITS: BroadcastLimitsByKind = {
        let low_limits = Self::new((250, 64), (1_000, 128), (10_000, 1_000));
        let mut limits_by_kind = [low_limits; intf::LIMITED_KIND_COUNT as usize];
        limits_by_kind[intf::LIMITED_ICMP_ERROR as usize] = Self::new((250, 64), (12_000, 1_000), (20_000, 2_000));
        limits_by_kind[intf::LIMITED_OWNER_LOST as usize] = Self::new((2_500, 500), (10_000, 1_000), (20_000, 2_000));
        limits_by_kind[intf::LIMITED_FRAGMENTATION_NEEDED as usize] =
            Self::new((250, 64), (10_000, 1_000), (20_000, 2_000));
        limits_by_kind
    };
}

/// Maximum number of entries in the flow table, which then takes 256 MB of kernel memory.
pub const MAX_FLOW_TABLE_ENTRIES: u32 = 1 << 24;

/// Options with which a load balancer is loaded.
#[derive(Debug, Clone, PartialEq)]
pub struct LoadBalancerOptions {
    /// Directory in a BPF file system for pinned objects. With `None`, maps and programs end with the process.
    pub pin_directory: Option<PathBuf>,
    /// Rate limits of packets that are broadcast to every server.
    pub broadcast_limits: BroadcastLimitsByKind,
    /// Number of flow table entries (16 bytes each) for connections without a cookie: 1 to [`MAX_FLOW_TABLE_ENTRIES`].
    /// It is rounded up to sets of 8. A table taken over from an earlier process keeps its size.
    pub flow_table_entry_count: u32,
    /// Clock from which the program restores the TCP timestamps of servers whose replies it stamps (LB-side stamping).
    pub lb_stamping_clock: LbStampingClock,
    /// Whether packets of stateful services update the clock if [`LoadBalancer::tick_packet_clock`] is late, so that
    /// connection table entries also age without a daemon. If false (the default), only `tick_packet_clock` sets the
    /// clock, to the time passed to it.
    pub packets_read_clock: bool,
    /// Number of connection table entries for stateful services (64 bytes each). A pinned table of another size is
    /// replaced if it is empty. If it has entries in use, loading fails.
    pub connection_table_size: ConnectionTableSize,
    /// Hash key for a new connection table, or `None` for a random key. Tests with a fixed seed set a key.
    pub connection_hash_key: Option<CookieKey>,
    /// VLAN in which clients' packets arrive.
    pub vip_vlan: Vlan,
}

impl Default for LoadBalancerOptions {
    fn default() -> Self {
        Self {
            pin_directory: None,
            broadcast_limits: BroadcastRateLimits::DEFAULT_BROADCAST_LIMITS,
            flow_table_entry_count: intf::DEFAULT_FLOW_TABLE_ENTRIES,
            lb_stamping_clock: LbStampingClock::default(),
            packets_read_clock: false,
            connection_table_size: ConnectionTableSize::default(),
            connection_hash_key: None,
            vip_vlan: Vlan::UNTAGGED,
        }
    }
}

/// Clock from which the program restores the TCP timestamps that servers sent, with LB-side stamping.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum LbStampingClock {
    /// The kernel's clock (CLOCK_MONOTONIC).
    #[default]
    Kernel,
    /// The time passed to the last [`LoadBalancer::tick_packet_clock`]. It stops without a daemon. Tests that compare
    /// the program with the model use it.
    DaemonTicks,
}

/// XDP mode that the configuration requests.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum XdpMode {
    /// The program runs in the driver. Attaching fails if the driver does not support this.
    Native,
    /// The program runs after the driver, on any device.
    Generic,
    /// Native mode if the driver supports it, or else generic mode with a warning.
    #[default]
    Auto,
}

/// XDP mode in which the program is attached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AttachedXdpMode {
    /// The program runs in the driver.
    Native,
    /// The program runs after the driver, which is slower.
    Generic,
}

/// Index of a service in the data plane's tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ServiceIndex(u16);

impl ServiceIndex {
    /// Returns the index as a number, as it is in connection table entries.
    pub fn as_u16(self) -> u16 {
        self.0
    }
}

/// A server's address and state in the data plane.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Server {
    /// MAC address of the server, or `None` if it is not resolved. Without it, the server gets no packets.
    pub mac: Option<MacAddress>,
    /// Whether the server gets new connections. A draining or unhealthy server gets only packets of established
    /// connections.
    pub is_eligible: bool,
}

/// Load balancer program with its maps and its link. Pinned objects continue to work after the value is dropped.
#[derive(Debug)]
pub struct LoadBalancer {
    lb_directory: Option<PathBuf>,
    maps: LoadBalancerMaps,
    variant: ProgramVariant,
    program: OwnedFd,
    xdp_link: Option<XdpLink>,
    attached_interface: Option<String>,
    services: BTreeMap<ServiceAddress, ForwardedService>,
    /// Addresses of services by index, for all indexes used since the process started.
    service_addresses_by_index: Vec<Option<ServiceAddress>>,
    /// Last known source MAC address in the replies of each server with LB-side stamping.
    lb_stamped_macs: BTreeMap<(ServiceIndex, ServerId), MacAddress>,
    server_vlans: BTreeSet<Vlan>,
    grace_periods: GracePeriodWaiter,
    /// Ticket of the grace period that must pass before the service directory's idle half may be written.
    service_directory_grace_ticket: GracePeriodTicket,
    /// Index of the connection table entry at which the next sweep starts.
    sweep_start_index: u32,
    connection_table_occupancy: ConnectionTableOccupancy,
    is_state_taken_over: bool,
    /// Link of another version's program, whose maps have another layout. That program forwards until the upgrade.
    old_program_link: Option<XdpLink>,
}

impl LoadBalancer {
    /// Loads the program. Objects that an earlier process pinned are taken over and continue to forward. Keys,
    /// services, servers, tables and counters are thus kept. Pinned objects with another layout forward until
    /// [`commit_upgrade`](Self::commit_upgrade). Fails when the pin directory is not on a BPF file system, or the
    /// kernel rejects the program. Also fails when the flow table's size is out of range, or the pinned connection
    /// table cannot get the requested size.
    pub fn load(options: LoadBalancerOptions) -> anyhow::Result<Self> {
        let map_sizes = BpfMapSizes::new(options.flow_table_entry_count, options.connection_table_size)?;
        let lb_directory = options.pin_directory.as_deref().map(pin_directory::ensure_lb_directory).transpose()?;
        let grace_periods = GracePeriodWaiter::start()?;
        let LoadedLbProgram { maps, variant, program, services, xdp_link, old_program_link: pending_upgrade } =
            LoadedLbProgram::load(&options, map_sizes, lb_directory.as_deref())?;
        let is_state_taken_over = xdp_link.is_some();
        let lb_stamped_macs =
            if is_state_taken_over { lb_stamping::read_lb_stamped_macs(&maps)? } else { BTreeMap::new() };
        Ok(Self {
            connection_table_occupancy: ConnectionTableOccupancy::count_used_entries(&maps),
            service_addresses_by_index: service_addresses_by_index(&services),
            // Objects may have been released just before the take-over, so the first write waits for a grace period.
            service_directory_grace_ticket: grace_periods.request_ticket(),
            grace_periods,
            lb_directory,
            maps,
            variant,
            program,
            xdp_link,
            attached_interface: None,
            services,
            lb_stamped_macs,
            server_vlans: BTreeSet::new(),
            sweep_start_index: 0,
            is_state_taken_over,
            old_program_link: pending_upgrade,
        })
    }

    /// Loads another variant of the program, and atomically replaces the attached program, if any, by this variant.
    fn load_variant(&mut self, variant: ProgramVariant) -> anyhow::Result<()> {
        if variant == self.variant {
            return Ok(());
        }
        let program = self.maps.load_program(&variant)?;
        if let Some(link) = &self.xdp_link {
            link.replace_program(program.as_fd()).context("replacing the program at the device")?;
        }
        self.program = program;
        self.variant = variant;
        let counts_by_cpu = u64::from(variant.has_per_cpu_counters);
        self.maps.state.store(offset_of!(intf::lb_state, counters_by_cpu), counts_by_cpu);
        Ok(())
    }

    /// Returns whether another version's program still forwards until [`commit_upgrade`](Self::commit_upgrade).
    pub fn is_upgrade_pending(&self) -> bool {
        self.old_program_link.is_some()
    }

    /// Replaces another version's program without losing packets, if such a program still forwards. It must be called
    /// as soon as this program's tables are complete. Fails when the kernel rejects the program or the pins.
    pub fn commit_upgrade(&mut self) -> anyhow::Result<()> {
        let Some(link) = self.old_program_link.take() else { return Ok(()) };
        link.replace_program(self.program.as_fd()).context("replacing the program at the device")?;
        if let Some(pins) = &self.lb_directory {
            program::unpin_maps(pins)?;
            self.maps.pin(pins)?;
        }
        self.xdp_link = Some(link);
        Ok(())
    }

    /// Returns whether [`load`](Self::load) took over a running load balancer's state.
    pub fn is_state_taken_over(&self) -> bool {
        self.is_state_taken_over
    }

    /// Returns the file descriptor of the current program, for test runs. If services change their placement rules or
    /// settings, another program may be loaded.
    pub fn program_fd(&self) -> BorrowedFd<'_> {
        self.program.as_fd()
    }

    /// Sets the keys with which cookies are made and checked.
    pub fn set_cookie_keys(&mut self, keys: &FleetCookieKeys) {
        let key_switch_ms = self.key_switch_time_ms(keys);
        let fleet_keys = intf::fleet_keys {
            key: keys.keys.map(|key| key.to_bpf_key()),
            current: keys.current_key_index.get() as u32,
            switch_ms: key_switch_ms,
        };
        self.maps.state.write(offset_of!(intf::lb_state, keys), &fleet_keys);
    }

    /// Detaches the program and removes all pins, so that forwarding ends. Fails when a pin cannot be removed.
    pub fn detach(mut self) -> anyhow::Result<()> {
        if let Some(pins) = &self.lb_directory {
            link::unpin_object(&pins.join("link"))?;
            program::unpin_maps_and_directory(pins)?;
        }
        self.xdp_link = None;
        self.old_program_link = None;
        Ok(())
    }

    fn service_address(&self, index: ServiceIndex) -> &ServiceAddress {
        self.service_addresses_by_index[usize::from(index.0)].as_ref().expect("an index that set_services returned")
    }

    fn service(&self, index: ServiceIndex) -> &ForwardedService {
        &self.services[self.service_address(index)]
    }

    fn service_mut(&mut self, index: ServiceIndex) -> &mut ForwardedService {
        let service_address = *self.service_address(index);
        self.services.get_mut(&service_address).expect("a place is of a service")
    }
}

/// Returns a list with each service's address at the position of the service's index, and `None` at unused positions.
fn service_addresses_by_index(services: &BTreeMap<ServiceAddress, ForwardedService>) -> Vec<Option<ServiceAddress>> {
    let index_count = services.values().map(|service| usize::from(service.index.0) + 1).max().unwrap_or(0);
    let mut addresses = vec![None; index_count];
    services.iter().for_each(|(address, service)| addresses[usize::from(service.index.0)] = Some(*address));
    addresses
}

const SERVER_FLAGS_SHIFT: u32 = 48;

/// Returns the byte offset of a server's entry in an array of `T` that is indexed by server id.
fn server_entry_offset<T>(id: u16) -> usize {
    usize::from(id) * size_of::<T>()
}

fn service_state_offset(service: ServiceIndex) -> usize {
    offset_of!(intf::lb_state, services) + usize::from(service.0) * size_of::<intf::service_state>()
}
