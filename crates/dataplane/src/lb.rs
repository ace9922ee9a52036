//! `bpf/lb.bpf.c` at the load balancer's device: loaded, attached, pinned, taken over, filled, read.
//!
//! What packets need is pinned below `lb/` of the configured directory and outlives the process:
//!
//! ```text
//! lb/state                 struct lb_state: keys, services, which half of each double buffer is active
//! lb/servers               MAC address and flags of every server
//! lb/placement_tables      two per service
//! lb/recent_first_packets  so that a retransmitted SYN reaches the same server
//! lb/counters
//! lb/link                  the program at the device
//! ```

mod link;
mod program;
mod tables;

use std::collections::BTreeMap;
use std::mem::offset_of;
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::PathBuf;

use anyhow::{Context as _, bail};
use coreward_intf as intf;
use coreward_model::cookie::FleetKeys;
use coreward_model::placement::PlacementTable;
use coreward_model::tuple::Protocol;
use coreward_model::{ServerId, ServiceAddress};

pub use coreward_intf::LB_COUNTER_NAMES as COUNTER_NAMES;
pub use tables::TableError;

use crate::mac::MacAddress;
use crate::mapped::wait_for_programs;
use crate::service_slots;
use link::XdpLink;
use program::{Maps, Variant};
use tables::Half;

/// How many counters there are.
pub const COUNTERS: usize = intf::LB_COUNTER_COUNT as usize;

/// How often packets may go to all servers of a service (`bpf/lb.bpf.c`, section 5).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ToAllRate {
    /// Packets per second and service, at least 1.
    pub per_second: u32,
    /// How many may come at once, at least 1.
    pub burst: u32,
}

impl Default for ToAllRate {
    fn default() -> Self {
        Self { per_second: 1_000, burst: 64 }
    }
}

/// How the load balancer is to run.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Options {
    /// Where to pin; below a BPF file system. `None`: everything ends with the process.
    pub pin_directory: Option<PathBuf>,
    /// Rate of deliveries to all servers.
    pub to_all: ToAllRate,
}

/// Where in the kernel the program is to run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum XdpMode {
    /// In the driver, or not at all.
    Native,
    /// After the driver, on any device.
    Generic,
    /// Native; where the driver cannot, generic with a warning.
    #[default]
    Auto,
}

/// Where in the kernel the program runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Attachment {
    /// In the driver.
    Native,
    /// After the driver: slower, with any device.
    Generic,
}

/// A service's place in the data plane's tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ServiceIndex(u8);

/// A server as the data plane knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Server {
    /// `None`: not resolved; nothing is sent to it.
    pub mac: Option<MacAddress>,
    /// Takes new connections. Without it (draining, unhealthy) only established ones reach it.
    pub eligible: bool,
}

/// What was done with packets, since the maps were made.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Counters {
    /// In the order of [`COUNTER_NAMES`].
    pub packets: [u64; COUNTERS],
    /// Frame bytes of what was forwarded.
    pub forwarded_bytes: u64,
}

#[derive(Debug)]
struct Service {
    index: ServiceIndex,
    /// Bit of the active table's rule; `None`: no members.
    rule: Option<u32>,
    halves: [Half; 2],
}

/// The program, its maps and its link. Dropping this leaves what is pinned at work.
#[derive(Debug)]
pub struct LoadBalancer {
    pins: Option<PathBuf>,
    maps: Maps,
    variant: Variant,
    program: OwnedFd,
    link: Option<XdpLink>,
    interface: Option<String>,
    services: BTreeMap<ServiceAddress, Service>,
    /// Grace periods waited for.
    grace_periods: u64,
    /// When programs were told to leave the idle half of the service directory.
    directory_retired_at: u64,
    taken_over: bool,
}

const DIRECTORIES: usize = offset_of!(intf::lb_state, directories);

impl LoadBalancer {
    /// Loads the program. What is pinned from before is taken over, with its keys, services, servers, tables and
    /// counters, and goes on forwarding all the while.
    ///
    /// # Errors
    /// When the pin directory is not on a BPF file system, what is pinned there is of another version, or the kernel
    /// refuses the program.
    pub fn load(options: Options) -> anyhow::Result<Self> {
        let pins = options.pin_directory.as_deref().map(program::pin_directory).transpose()?;
        let link = pins.as_ref().map(|pins| XdpLink::pinned(&pins.join("link"))).transpose()?.flatten();
        if let (Some(pins), None) = (&pins, &link)
            && program::any_pinned(pins)
        {
            // Nothing forwards by these: a start that was cut short, or a link that somebody removed.
            tracing::warn!("{}: maps without a link are removed", pins.display());
            program::unpin(pins)?;
            std::fs::create_dir_all(pins).with_context(|| pins.display().to_string())?;
        }
        let mut variant = Variant { rules: DEFAULT_RULES, counters_by_cpu: false, to_all: options.to_all };
        let taken_over = link.is_some();
        let (maps, program, services) = match &pins {
            Some(pins) if taken_over => {
                let maps = Maps::take_over(pins)?;
                let services = services_of(&maps);
                variant.rules = rules_of(&services);
                variant.counters_by_cpu = maps.state.load(offset_of!(intf::lb_state, counters_by_cpu)) != 0;
                let program = maps.load(&variant)?;
                (maps, program, services)
            }
            _ => {
                let (maps, program) = Maps::create(&variant)?;
                if let Some(pins) = &pins {
                    maps.pin(pins)?;
                }
                (maps, program, BTreeMap::new())
            }
        };
        Ok(Self {
            pins,
            maps,
            variant,
            program,
            link,
            interface: None,
            services,
            // Halves that were taken over are retired at 0, as new ones are: the first write waits for a grace period.
            grace_periods: 0,
            directory_retired_at: 0,
            taken_over,
        })
    }

    /// Puts the program at the device `interface`: in the place of the pinned one if there is one.
    ///
    /// # Errors
    /// When the interface does not exist, another XDP program is there, what was taken over is at another interface, or
    /// the driver cannot run XDP and `mode` is [`XdpMode::Native`].
    pub fn attach(&mut self, interface: &str, mode: XdpMode) -> anyhow::Result<Attachment> {
        let index = nix::net::if_::if_nametoindex(interface)
            .map_err(|_| anyhow::anyhow!("interface {interface:?} does not exist"))?;
        self.interface = Some(interface.to_string());
        self.refresh_own_mac()?;
        if let Some(link) = &self.link {
            match link.interface_index()? {
                0 => tracing::warn!("the device of the pinned link is gone: attaching anew"),
                found if found == index => return self.replace_pinned(mode),
                found => bail!(
                    "what is pinned in {} is at the interface of index {found}, not at {interface:?} (index {index}): \
                     detach it first, or use another pin directory",
                    self.pins.as_deref().unwrap_or(std::path::Path::new("")).display()
                ),
            }
            self.link = None;
        }
        let attachment = self.attach_new(interface, index, mode)?;
        if let (Some(pins), Some(link)) = (&self.pins, &self.link) {
            link::unpin(&pins.join("link"))?;
            link.pin(&pins.join("link"))?;
        }
        Ok(attachment)
    }

    fn replace_pinned(&mut self, mode: XdpMode) -> anyhow::Result<Attachment> {
        let link = self.link.as_ref().expect("a pinned link");
        link.replace(self.program.as_fd()).context("replacing the program at the device")?;
        let attachment = if self.variant.counters_by_cpu { Attachment::Generic } else { Attachment::Native };
        if mode != XdpMode::Auto && (mode == XdpMode::Generic) != (attachment == Attachment::Generic) {
            tracing::warn!("the program taken over stays {attachment:?}: detach it to change the mode");
        }
        Ok(attachment)
    }

    fn attach_new(&mut self, interface: &str, index: u32, mode: XdpMode) -> anyhow::Result<Attachment> {
        if mode != XdpMode::Generic {
            match self.attach_in(Attachment::Native, interface, index) {
                Err(error) if mode == XdpMode::Auto => {
                    tracing::warn!("{error:#}; trying generic XDP, which is slower");
                }
                other => return other,
            }
        }
        self.attach_in(Attachment::Generic, interface, index)
    }

    fn attach_in(&mut self, attachment: Attachment, interface: &str, index: u32) -> anyhow::Result<Attachment> {
        let counters_by_cpu = attachment == Attachment::Generic;
        self.change_variant(Variant { counters_by_cpu, ..self.variant })?;
        let link =
            XdpLink::create(self.program.as_fd(), index, attachment).map_err(|error| match error.raw_os_error() {
                Some(libc::EBUSY) => anyhow::anyhow!(
                    "interface {interface:?} has another XDP program: remove it first (ip link set {interface} xdp off)"
                ),
                _ => anyhow::Error::from(error).context(format!("{attachment:?} XDP at interface {interface:?}")),
            })?;
        self.link = Some(link);
        Ok(attachment)
    }

    /// Loads another variant and, if a program is at the device, puts the new one in its place atomically.
    fn change_variant(&mut self, variant: Variant) -> anyhow::Result<()> {
        if variant == self.variant {
            return Ok(());
        }
        let program = self.maps.load(&variant)?;
        if let Some(link) = &self.link {
            link.replace(program.as_fd()).context("replacing the program at the device")?;
        }
        self.program = program;
        self.variant = variant;
        let by_cpu = u64::from(variant.counters_by_cpu);
        self.maps.state.store(offset_of!(intf::lb_state, counters_by_cpu), by_cpu);
        Ok(())
    }

    /// Whether [`load`](Self::load) found a load balancer at work.
    pub fn taken_over(&self) -> bool {
        self.taken_over
    }

    /// The program now in use, for test runs. Another one after a table whose rule was not in use.
    pub fn program(&self) -> BorrowedFd<'_> {
        self.program.as_fd()
    }

    /// Reads the device's MAC address again: frames to another one are not ours. To be called now and then, as somebody
    /// may change it.
    ///
    /// # Errors
    /// When the device is gone.
    pub fn refresh_own_mac(&mut self) -> anyhow::Result<()> {
        let interface = self.interface.as_deref().context("not attached")?;
        let mac = mac_of(interface)?.with_context(|| format!("interface {interface:?} has no MAC address"))?;
        self.set_own_mac(mac);
        Ok(())
    }

    /// Frames to this address are taken, and leave with it as their source. Set by [`attach`](Self::attach).
    pub fn set_own_mac(&mut self, mac: MacAddress) {
        self.maps.state.store(offset_of!(intf::lb_state, own_mac_shifted), mac.word() << 16);
    }

    /// Sets the cookie's keys.
    pub fn set_keys(&mut self, keys: &FleetKeys) {
        let key = |index: usize| intf::cookie_key { k0: keys.keys[index].k0, k1: keys.keys[index].k1 };
        let fleet = intf::fleet_keys { key: [key(0), key(1)], current: keys.current.get() as u32, reserved: 0 };
        self.maps.state.write(offset_of!(intf::lb_state, keys), &fleet);
    }

    /// Sets which services there are, and returns the place of each. A service that was there keeps its place, its
    /// servers and its table; one that is new has neither.
    ///
    /// # Errors
    /// When services have no place (too many, twice the same, IPv6): nothing has changed then.
    pub fn set_services(&mut self, addresses: &[ServiceAddress]) -> anyhow::Result<Vec<ServiceIndex>> {
        let unnumbered: Vec<_> = addresses.iter().map(|address| (*address, 0)).collect();
        service_slots::directory(&unnumbered)?;
        let before = self.services.len();
        self.services.retain(|address, _| addresses.contains(address));
        if self.services.len() < before {
            self.switch_directory()?;
        }
        let new: Vec<_> = addresses.iter().filter(|address| !self.services.contains_key(address)).collect();
        if !new.is_empty() {
            // Programs that still look for a service removed before must have ended before its place is another's.
            self.wait_since(self.directory_retired_at)?;
            for address in new {
                let index = self.free_place();
                self.clear(index);
                self.services.insert(*address, Service { index, rule: None, halves: Default::default() });
            }
            self.switch_directory()?;
        }
        Ok(addresses.iter().map(|address| self.services[address].index).collect())
    }

    fn free_place(&self) -> ServiceIndex {
        let taken = |index| self.services.values().any(|service| service.index == index);
        (0..intf::MAX_SERVICES as u8).map(ServiceIndex).find(|index| !taken(*index)).expect("checked by directory()")
    }

    /// Puts the services as they are in `self` into the idle half of the directory, and switches.
    fn switch_directory(&mut self) -> anyhow::Result<()> {
        self.wait_since(self.directory_retired_at)?;
        let numbered: Vec<_> =
            self.services.iter().map(|(address, service)| (*address, u32::from(service.index.0))).collect();
        let directory = service_slots::directory(&numbered)?;
        let active = DIRECTORIES + offset_of!(intf::service_directories, active);
        let idle = self.maps.state.load(active) ^ 1;
        let half = offset_of!(intf::service_directories, half) + idle as usize * size_of::<intf::service_directory>();
        self.maps.state.write(DIRECTORIES + half, &*directory);
        self.maps.state.store(active, idle);
        self.directory_retired_at = self.grace_periods;
        Ok(())
    }

    /// A place without servers and without a table.
    fn clear(&mut self, index: ServiceIndex) {
        self.maps.servers.write(server_at(index, 0), vec![0u64; ServerId::COUNT].as_slice());
        for half in 0..2 {
            tables::clear(&self.maps.tables, table_position(index, half));
        }
        self.maps.state.write(state_of(index), &intf::service_state::default());
    }

    /// The services and their places.
    pub fn services(&self) -> impl Iterator<Item = (ServiceAddress, ServiceIndex)> + '_ {
        self.services.iter().map(|(address, service)| (*address, service.index))
    }

    /// Makes a server known, or changes what is known of it.
    pub fn set_server(&mut self, service: ServiceIndex, id: ServerId, server: Server) {
        let flags = intf::SERVER_KNOWN
            | if server.mac.is_some() { intf::SERVER_RESOLVED } else { 0 }
            | if server.eligible { intf::SERVER_ELIGIBLE } else { 0 };
        let mac = server.mac.map_or(0, MacAddress::word);
        self.maps.servers.store(server_at(service, id.get()), mac | u64::from(flags) << SERVER_FLAGS_SHIFT);
    }

    /// Forgets a server: its connections' packets then go to all servers, rate-limited.
    pub fn remove_server(&mut self, service: ServiceIndex, id: ServerId) {
        self.maps.servers.store(server_at(service, id.get()), 0);
    }

    /// The servers known of a service, by id: after a take-over those of the process before.
    pub fn servers(&self, service: ServiceIndex) -> Vec<(ServerId, Server)> {
        let known = |id: u16| {
            let word = self.maps.servers.load(server_at(service, id));
            let flags = (word >> SERVER_FLAGS_SHIFT) as u32;
            let mac = (flags & intf::SERVER_RESOLVED != 0).then(|| MacAddress::from_word(word));
            let server = Server { mac, eligible: flags & intf::SERVER_ELIGIBLE != 0 };
            (flags & intf::SERVER_KNOWN != 0).then(|| (ServerId::try_from(u64::from(id)).expect("in range"), server))
        };
        (0..ServerId::COUNT as u16).filter_map(known).collect()
    }

    /// Installs a service's table by one atomic switch: every first packet is placed by the table before or by this one.
    /// Waits for an RCU grace period (some ms) unless one has passed since the service's previous table.
    ///
    /// # Errors
    /// When the table cannot be held ([`TableError`]), or the kernel refuses the program for its rule: the table before
    /// stays then.
    ///
    /// # Panics
    /// When `service` is none of [`services`](Self::services).
    pub fn install_table(&mut self, service: ServiceIndex, table: &PlacementTable) -> anyhow::Result<()> {
        tables::check(table)?;
        let rule = (!table.members.is_empty()).then(|| 1 << table.rule.number());
        self.change_variant(Variant { rules: self.variant.rules | rule.unwrap_or(0), ..self.variant })?;
        let active = self.active_half(service);
        let idle = active ^ 1;
        self.wait_since(self.service(service).halves[idle].retired_at)?;

        let address = self.address(service);
        let mut half = std::mem::take(&mut self.service_mut(service).halves[idle]);
        tables::write(&self.maps.tables, table_position(service, idle), &mut half, address, table);
        self.maps.state.store(state_of(service) + offset_of!(intf::service_state, active_half), idle as u64);
        let grace_periods = self.grace_periods;
        let entry = self.service_mut(service);
        entry.halves[idle] = half;
        entry.halves[active].retired_at = grace_periods;
        entry.rule = rule;
        // What no table uses any more need not be compiled in. The new variant may find the old table for a moment:
        // a first packet on another CPU that read the old half; it runs in the old program.
        self.change_variant(Variant { rules: rules_of(&self.services), ..self.variant })
    }

    /// The generation of a service's table; `None`: it has none, or one without members.
    pub fn table_generation(&self, service: ServiceIndex) -> Option<u64> {
        let position = table_position(service, self.active_half(service));
        tables::rule_bit(&self.maps.tables, position).map(|_| tables::generation(&self.maps.tables, position))
    }

    /// Returns when a grace period has passed since `retired_at`.
    fn wait_since(&mut self, retired_at: u64) -> anyhow::Result<()> {
        if retired_at == self.grace_periods {
            wait_for_programs().context("waiting for an RCU grace period by membarrier(2)")?;
            self.grace_periods += 1;
        }
        Ok(())
    }

    /// What was done with a service's packets.
    pub fn counters(&self, service: ServiceIndex) -> Counters {
        self.counters_at(usize::from(service.0))
    }

    /// What was done with packets of no service, or whose service could not be told.
    pub fn counters_without_service(&self) -> Counters {
        self.counters_at(intf::LB_COUNTERS_NO_SERVICE as usize)
    }

    fn counters_at(&self, position: usize) -> Counters {
        let mut sum = Counters::default();
        for row in 0..intf::LB_COUNTER_ROWS as usize {
            let start = row * size_of::<intf::lb_counter_row>() + position * size_of::<intf::lb_counters>();
            let packets = start + offset_of!(intf::lb_counters, packets);
            for (counter, sum) in sum.packets.iter_mut().enumerate() {
                *sum += self.maps.counters.load(packets + counter * size_of::<u64>());
            }
            sum.forwarded_bytes += self.maps.counters.load(start + offset_of!(intf::lb_counters, forwarded_bytes));
        }
        sum
    }

    /// Takes the program from the device and removes all pins: forwarding ends.
    ///
    /// # Errors
    /// When a pin cannot be removed.
    pub fn detach(mut self) -> anyhow::Result<()> {
        if let Some(pins) = &self.pins {
            link::unpin(&pins.join("link"))?;
            program::unpin(pins)?;
        }
        self.link = None;
        Ok(())
    }

    fn active_half(&self, service: ServiceIndex) -> usize {
        let word = self.maps.state.load(state_of(service) + offset_of!(intf::service_state, active_half));
        usize::from(word & 1 != 0)
    }

    fn find(&self, index: ServiceIndex) -> (&ServiceAddress, &Service) {
        self.services.iter().find(|(_, service)| service.index == index).expect("an index that set_services returned")
    }

    fn service(&self, index: ServiceIndex) -> &Service {
        self.find(index).1
    }

    fn service_mut(&mut self, index: ServiceIndex) -> &mut Service {
        self.services.values_mut().find(|service| service.index == index).expect("an index that set_services returned")
    }

    fn address(&self, index: ServiceIndex) -> SocketAddrV4 {
        match self.find(index).0.socket {
            SocketAddr::V4(vip) => vip,
            SocketAddr::V6(_) => unreachable!("refused by service_slots"),
        }
    }
}

const SERVER_FLAGS_SHIFT: u32 = 48;

/// With no table at all this rule is compiled in: most likely the first one's.
const DEFAULT_RULES: u32 = 1 << intf::PLACEMENT_RULE_TABLE;

fn server_at(service: ServiceIndex, id: u16) -> usize {
    (usize::from(service.0) * ServerId::COUNT + usize::from(id)) * size_of::<intf::server_entry>()
}

fn state_of(service: ServiceIndex) -> usize {
    offset_of!(intf::lb_state, services) + usize::from(service.0) * size_of::<intf::service_state>()
}

fn table_position(service: ServiceIndex, half: usize) -> usize {
    usize::from(service.0) << 1 | half
}

/// The rules of all tables as bits.
fn rules_of(services: &BTreeMap<ServiceAddress, Service>) -> u32 {
    let rules = services.values().filter_map(|service| service.rule).fold(0, |bits, rule| bits | rule);
    if rules == 0 { DEFAULT_RULES } else { rules }
}

/// The services that stand in maps taken over.
fn services_of(maps: &Maps) -> BTreeMap<ServiceAddress, Service> {
    let directories = maps.state.read::<intf::service_directories>(DIRECTORIES);
    let named = directories.half[usize::from(directories.active & 1 != 0)].slots.iter().filter_map(|slot| {
        let protocol = [Protocol::Tcp].into_iter().find(|protocol| protocol.number() == slot.key.protocol)?;
        let index = ServiceIndex(u8::try_from(slot.number).ok().filter(|n| u32::from(*n) < intf::MAX_SERVICES)?);
        let vip = Ipv4Addr::from(slot.key.address[3].to_ne_bytes());
        Some((ServiceAddress { socket: (vip, u16::from_be(slot.key.port)).into(), protocol }, index))
    });
    let with_rule = |(address, index): (ServiceAddress, ServiceIndex)| {
        let state = maps.state.read::<intf::service_state>(state_of(index));
        let rule = tables::rule_bit(&maps.tables, table_position(index, (state.active_half & 1) as usize));
        (address, Service { index, rule, halves: Default::default() })
    };
    named.map(with_rule).collect()
}

/// The interface's MAC address. Not from /sys, which may show another network namespace.
fn mac_of(interface: &str) -> anyhow::Result<Option<MacAddress>> {
    let addresses = nix::ifaddrs::getifaddrs().context("reading the interfaces' addresses")?;
    let mac = addresses.filter(|entry| entry.interface_name == interface).find_map(|entry| {
        let address = entry.address?;
        address.as_link_addr()?.addr()
    });
    Ok(mac.map(MacAddress))
}
