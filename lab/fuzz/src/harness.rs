//! Harness: a load balancer as BPF program and as reference model, with the changes of their state.

use std::collections::BTreeMap;
use std::mem::offset_of;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use coreward_dataplane::lb::{self as dataplane, OuterSources, PacketRate, ServiceIndex};
use coreward_dataplane::mac::MacAddress;
use coreward_dataplane::test_run;
use coreward_intf as intf;
use coreward_model::ServerId;
use coreward_model::connection_table::{Connection, TableSize, Timeouts};
use coreward_model::consistency::Timestamps;
use coreward_model::cookie::{CookieKey, FleetKeys};
use coreward_model::lb::{
    BroadcastRates, LbSettings, LoadBalancer, Mac, Outcome, OuterHeader, Owner, REASON_COUNT, Rate, Tunnel, Vlans,
    XdpVerdict,
};
use coreward_model::lb_stamping::ServerClock;
use coreward_model::vlan::Vlan;

use crate::change::{Change, Difference};
use crate::frame::{ETHERNET_HEADER_BYTES, hex, ones_complement_sum, untagged};
use crate::guarantees::Guarantees;
use crate::memory::{COUNTER_WORDS, Memory};

/// linux/bpf.h
const XDP_TX: i32 = 3;
const NO_SERVICE: usize = intf::LB_COUNTERS_NO_SERVICE as usize;

/// MAC address of the load balancer in tests with a single one.
pub const OWN_MAC: Mac = [2, 0, 0, 0, 0, 1];
/// Key of timestamps for all servers, and for all services with LB-side stamping.
pub const TIME_KEY: CookieKey = CookieKey { k0: 5, k1: 6 };

/// Broadcast rate of one packet per second, with a burst that never runs out. Therefore the state
/// ([`Change::BroadcastTokens`]), not the time, decides whether a token is available.
const BROADCAST_RATE: PacketRate = PacketRate { per_second: 1, burst: u32::MAX };
const BROADCAST_INTERVAL_NS: u64 = 1_000_000_000;

/// Settings with which the program is loaded.
#[derive(Debug, Clone, Copy)]
pub struct HarnessSetup {
    /// MAC address of the load balancer: destination of received frames, and source of sent ones.
    pub own_mac: Mac,
    pub keys: FleetKeys,
    /// Whether the program counts packets and bytes of each server.
    pub count_traffic: bool,
    /// Size of the connection table, which stateful services use.
    pub connection_table: TableSize,
    pub connection_key: CookieKey,
    pub flow_set_count: u32,
    /// Fields that all outer headers have in common.
    pub outer: OuterHeader,
    /// VLANs in use. Without any, all servers are untagged.
    pub vlans: Vlans,
}

/// Default fields that all outer headers have in common.
const OUTER: OuterHeader = OuterHeader {
    address: Ipv4Addr::new(10, 2, 0, 1),
    address_ipv6: Ipv6Addr::new(0x2001, 0xdb8, 2, 0, 0, 0, 0, 1),
    mtu: 1500,
};

/// Returns the tunnel of a server, which is derived from its id.
fn tunnel_of(id: ServerId) -> Tunnel {
    let [high, low] = id.get().to_be_bytes();
    let address = if id.get().is_multiple_of(2) {
        Ipv4Addr::new(10, 9, high, low).into()
    } else {
        Ipv6Addr::new(0x2001, 0xdb8, 9, 0, 0, 0, 0, id.get()).into()
    };
    Tunnel { address, source_port: id.get().is_multiple_of(3).then_some(40_000) }
}

/// Ids of the VLANs in which servers are; 0 means untagged.
pub const SERVER_VLANS: [u16; 3] = [0, 20, 4094];

fn vlan(id: u16) -> Vlan {
    Vlan::from_id(id.into()).expect("in range")
}

/// Returns the VLAN of a server, which is derived from its id.
fn vlan_of(id: ServerId) -> Vlan {
    vlan(SERVER_VLANS[usize::from(id.get()) % SERVER_VLANS.len()])
}

/// Returns the VLAN of a service's broadcasts, which is derived from its slot. Every fourth service has none.
fn broadcast_vlan_of(service_slot: usize) -> Option<Vlan> {
    SERVER_VLANS.get(service_slot % 4).map(|id| vlan(*id))
}

impl HarnessSetup {
    /// Returns the default setup of a load balancer with this MAC address and these keys.
    pub fn new(own_mac: Mac, keys: FleetKeys) -> Self {
        let connection_key = CookieKey { k0: 0x5d3c_91ab_04e7_aa13, k1: 0x0f1e_77c9_d2b4_5a61 };
        let (connection_table, flow_set_count) = (TableSize::default(), 1 << 15);
        Self {
            own_mac,
            keys,
            count_traffic: false,
            connection_table,
            connection_key,
            flow_set_count,
            outer: OUTER,
            vlans: Vlans::default(),
        }
    }
}

/// Loaded BPF program with its load balancer in user space.
pub struct LoadedProgram {
    lb: dataplane::LoadBalancer,
    memory: Memory,
    services: Vec<Option<ServiceIndex>>,
    output_frame: Vec<u8>,
}

impl LoadedProgram {
    /// Loads the BPF program. Fails without the necessary capabilities.
    pub fn load(setup: &HarnessSetup) -> anyhow::Result<Self> {
        let connection_table_size = setup.connection_table;
        let options = dataplane::Options {
            broadcast_limits: [dataplane::BroadcastRates::uniform(BROADCAST_RATE); REASON_COUNT],
            flow_table_entries: setup.flow_set_count * intf::FLOW_SET_ENTRIES,
            connection_table_size,
            connection_key: Some(setup.connection_key),
            vlan: setup.vlans.vip,
            // The reference model then sees the same time.
            lb_stamping_clock: dataplane::LbStampingClock::Ticks,
            ..Default::default()
        };
        let mut lb = dataplane::LoadBalancer::load(options)?;
        lb.set_own_mac(MacAddress(setup.own_mac));
        lb.set_keys(&setup.keys);
        let sources = OuterSources { ipv4: setup.outer.address, ipv6: setup.outer.address_ipv6 };
        lb.set_outer_header(sources, setup.outer.mtu as u32);
        lb.count_traffic(setup.count_traffic)?;
        if setup.vlans.is_tagging_enabled {
            lb.use_server_vlans(SERVER_VLANS.iter().map(|id| vlan(*id)).collect())?;
        }
        let memory = Memory::of(lb.program())?;
        let services = vec![None; intf::MAX_SERVICES as usize];
        Ok(Self { lb, memory, services, output_frame: vec![0; 1 << 14] })
    }

    fn service(&self, service_slot: usize) -> ServiceIndex {
        self.services[service_slot].expect("a service that was set")
    }

    /// Applies a change to the program. `service_slots`: slots that the reference model gave to the services of a
    /// [`Change::Services`]. `freed`: connections of a [`Change::Free`].
    fn change(&mut self, change: &Change, service_slots: &[usize], freed: &[Connection]) -> anyhow::Result<()> {
        match change {
            Change::Keys(keys) => self.lb.set_keys(keys),
            Change::Services(services) => {
                let indexes = self.lb.set_services(services)?;
                self.services.fill(None);
                for ((_, mode), index) in services.iter().zip(&indexes) {
                    if mode.timestamps == Timestamps::LoadBalancer {
                        self.lb.set_time_key(*index, TIME_KEY);
                    }
                }
                service_slots
                    .iter()
                    .zip(indexes)
                    .for_each(|(service_slot, index)| self.services[*service_slot] = Some(index));
                for slot in service_slots {
                    let index = self.service(*slot);
                    self.lb.set_broadcast_vlan(index, broadcast_vlan_of(*slot));
                }
            }
            Change::Server(service_slot, id, Some(server)) => {
                let server = dataplane::Server { mac: server.mac.map(MacAddress), is_eligible: server.eligible };
                self.lb.set_server(self.service(*service_slot), *id, server);
                let Tunnel { address, source_port } = tunnel_of(*id);
                self.lb.set_tunnel(*id, dataplane::Tunnel { address, source_port })?;
                self.lb.set_server_vlan(*id, vlan_of(*id));
            }
            Change::Server(service_slot, id, None) => self.lb.remove_server(self.service(*service_slot), *id),
            Change::Masked(service_slot, id, is_masked) => {
                self.lb.set_masked(self.service(*service_slot), *id, *is_masked)
            }
            Change::Table(service_slot, table) => self.lb.install_table(self.service(*service_slot), table)?,
            Change::BroadcastTokens(buckets, there) => self.memory.set_paid_until(*buckets, paid_until(*there)),
            Change::LocalOwnerNumber(owner) => self.lb.set_owner_number(*owner),
            Change::LimitEntries(per_source) => self.memory.limit_entries(*per_source),
            Change::Owner(number, Owner::Unknown) => self.lb.forget_owner(*number),
            Change::Owner(number, Owner::Lost) => self.lb.set_owner_mac(*number, None),
            Change::Owner(number, Owner::Reachable(mac)) => self.lb.set_owner_mac(*number, Some(MacAddress(*mac))),
            Change::Clock(clock) => self.lb.tick(Duration::from_millis(u64::from(clock.0) * 100)),
            Change::Sweep => drop(self.lb.due_connections(&Timeouts::default(), 0)),
            Change::Free(_) => {
                let count = self.lb.free_connections(freed)?;
                ensure!(count == freed.len(), "{count} of {} entries were freed", freed.len());
            }
        }
        Ok(())
    }

    fn run(&mut self, frame: &[u8]) -> anyhow::Result<(i32, usize)> {
        test_run::run_into(self.lb.program(), frame, &mut self.output_frame)
            .with_context(|| format!("a test run of {} bytes", frame.len()))
    }
}

fn paid_until(tokens: bool) -> u64 {
    if tokens { 0 } else { u64::MAX }
}

fn compare_values<T: PartialEq>(what: &str, expected: T, found: T, text: impl Fn(&T) -> String) -> Option<Difference> {
    (expected != found).then(|| Difference {
        subject: what.to_owned(),
        expected: text(&expected),
        actual: text(&found),
    })
}

/// Returns a difference when the checksum of an IPv4 header was correct before the packet was processed, and is wrong
/// afterwards.
fn checksum_difference(before: &[u8], after: &[u8]) -> Option<Difference> {
    let right =
        |frame: &[u8]| ones_complement_sum(&frame[ETHERNET_HEADER_BYTES..ETHERNET_HEADER_BYTES + 20], 0) == 0xffff;
    // Only headers without options, which the program never changes. An outer IPv6 header has no checksum.
    let plain = |frame: &[u8]| frame.len() >= ETHERNET_HEADER_BYTES + 20 && frame[ETHERNET_HEADER_BYTES] == 0x45;
    let changed = plain(before) && plain(after) && before[ETHERNET_HEADER_BYTES..] != after[ETHERNET_HEADER_BYTES..];
    (changed && right(before) && !right(after)).then(|| Difference {
        subject: "an IP header checksum was right and is not any more".to_owned(),
        expected: hex(before),
        actual: hex(after),
    })
}

/// BPF program and its reference model, to which the same changes and packets are applied.
pub struct Harness {
    pub model: LoadBalancer,
    /// Loaded BPF program; `None` when only the reference model runs.
    instance: Option<LoadedProgram>,
    /// Expected counters of each service, and of packets without a service.
    counters: Vec<[u64; COUNTER_WORDS]>,
    /// Last frame, as the reference model has changed it.
    expected_frame: Vec<u8>,
    guarantees: Guarantees,
    now_ns: u64,
}

impl Harness {
    /// Returns a harness with empty state. `with_program` also loads the BPF program, which needs capabilities.
    pub fn new(setup: HarnessSetup, with_program: bool) -> anyhow::Result<Self> {
        let burst_ns = BROADCAST_INTERVAL_NS * u64::from(BROADCAST_RATE.burst - 1);
        let rate = Rate { interval_ns: BROADCAST_INTERVAL_NS, burst_ns };
        let constants = LbSettings {
            broadcast_rates: [BroadcastRates { per_source: rate, per_service: rate, total: rate }; REASON_COUNT],
            flow_set_count: setup.flow_set_count,
            connection_table: setup.connection_table,
            counts_traffic: setup.count_traffic,
            outer_header: setup.outer,
            vlans: setup.vlans,
        };
        let mut model = LoadBalancer::new(constants, setup.own_mac, setup.keys);
        model.set_connection_key(setup.connection_key);
        Ok(Self {
            instance: with_program.then(|| LoadedProgram::load(&setup)).transpose()?,
            model,
            counters: vec![[0; COUNTER_WORDS]; intf::MAX_SERVICES as usize + 1],
            expected_frame: Vec::new(),
            guarantees: Guarantees::default(),
            now_ns: 1,
        })
    }

    /// Applies `change` to the program and the model. Returns the slots of a [`Change::Services`]. Fails when the
    /// kernel or the load balancer rejects the change.
    pub fn change(&mut self, change: &Change) -> anyhow::Result<Vec<usize>> {
        let mut service_slots = Vec::new();
        let freed: Vec<Connection> = match change {
            Change::Free(indexes) => indexes.iter().filter_map(|index| self.model.connection(*index)).collect(),
            _ => Vec::new(),
        };
        match change {
            Change::Keys(keys) => self.model.set_keys(*keys),
            Change::Services(services) => {
                let before: Vec<_> =
                    (0..NO_SERVICE).map(|service_slot| self.model.address_of_service(service_slot)).collect();
                service_slots = self.model.set_services(services);
                // A new service starts with counters of zero.
                for service_slot in service_slots
                    .iter()
                    .filter(|service_slot| before[**service_slot] != self.model.address_of_service(**service_slot))
                {
                    self.counters[*service_slot] = [0; COUNTER_WORDS];
                }
                for ((_, mode), service_slot) in services.iter().zip(&service_slots) {
                    self.model.set_broadcast_vlan(*service_slot, broadcast_vlan_of(*service_slot));
                    if mode.timestamps == Timestamps::LoadBalancer {
                        self.model.set_time_key(*service_slot, TIME_KEY);
                    }
                }
            }
            Change::Server(service_slot, id, server) => {
                self.model.set_tunnel(*id, tunnel_of(*id));
                self.model.set_server_vlan(*id, vlan_of(*id));
                self.model.set_server(*service_slot, *id, *server);
            }
            Change::Masked(service_slot, id, is_masked) => self.model.set_masked(*service_slot, *id, *is_masked),
            Change::Table(service_slot, table) => self.model.install_table(*service_slot, table.clone()),
            Change::BroadcastTokens(buckets, there) => self.model.set_paid_until(*buckets, paid_until(*there)),
            Change::LocalOwnerNumber(owner) => self.model.set_owner(*owner),
            Change::LimitEntries(per_source) => self.model.limit_entries(*per_source),
            Change::Owner(number, owner) => self.model.set_owner_at(*number, *owner),
            Change::Clock(clock) => self.model.set_clock(*clock),
            Change::Sweep => self.model.record_sweep(),
            Change::Free(_) => self.model.free_connections(&freed),
        }
        if let Some(instance) = &mut self.instance {
            instance.change(change, &service_slots, &freed)?;
        }
        self.guarantees.apply(change, &service_slots);
        Ok(service_slots)
    }

    /// Returns whether the service that `change` refers to exists.
    pub fn is_applicable(&self, change: &Change) -> bool {
        match change {
            Change::Server(service_slot, ..) | Change::Masked(service_slot, ..) | Change::Table(service_slot, _) => {
                self.model.has_service(*service_slot)
            }
            _ => true,
        }
    }

    /// Processes `frame` in the program and in the model. Returns the model's outcome, and any difference. Fails when
    /// the kernel rejects the test run.
    pub fn process_packet(&mut self, frame: &[u8]) -> anyhow::Result<(Outcome, Option<Difference>)> {
        self.now_ns += 1;
        self.expected_frame.clear();
        self.expected_frame.extend_from_slice(frame);
        let outcome = self.model.receive(&mut self.expected_frame, self.now_ns);
        let (given, left) = (untagged(frame), untagged(&self.expected_frame).into_owned());
        self.count(&outcome, given.len());
        let Some(instance) = &mut self.instance else { return Ok((outcome, None)) };
        let (verdict, length) = instance.run(frame)?;
        let exceeds_mtu =
            [intf::LB_COUNTER_DROP_EXCEEDS_MTU, intf::LB_COUNTER_DROP_FRAGMENTATION_NEEDED].contains(&outcome.counter);
        let is_forwarded = verdict == XDP_TX && !exceeds_mtu;
        let broken =
            if is_forwarded { self.guarantees.find_violation(&given, &instance.output_frame[..length]) } else { None };
        if exceeds_mtu {
            self.guarantees.record_dropped_datagram(&given);
        }
        let expected_verdict = outcome.verdict().xdp_action();
        let difference = broken
            .or_else(|| {
                compare_values("the verdict (1: drop, 2: pass, 3: transmit)", expected_verdict, verdict, i32::to_string)
            })
            .or_else(|| {
                compare_values("the packet", &self.expected_frame[..], &instance.output_frame[..length], |bytes| {
                    hex(bytes)
                })
            })
            .or_else(|| checksum_difference(&given, &left))
            .or_else(|| self.compare_counters(outcome.service.unwrap_or(NO_SERVICE)));
        Ok((outcome, difference))
    }

    /// Returns the last frame of [`process_packet`](Self::process_packet), as the reference model has changed it.
    pub fn frame_after(&self) -> &[u8] {
        &self.expected_frame
    }

    fn count(&mut self, outcome: &Outcome, length: usize) {
        let service = outcome.service.unwrap_or(NO_SERVICE);
        let words = &mut self.counters[service];
        words[offset_of!(intf::lb_counters, packets) / 8 + outcome.counter as usize] += 1;
        if let Some(event) = outcome.event {
            words[offset_of!(intf::lb_counters, events) / 8 + event as usize] += 1;
        }
        if outcome.service.is_some() {
            words[offset_of!(intf::lb_counters, opened) / 8] = self.model.opened_connections(service);
        }
        if outcome.verdict() == XdpVerdict::Transmit && outcome.counter != intf::LB_COUNTER_DROP_FRAGMENTATION_NEEDED {
            words[offset_of!(intf::lb_counters, forwarded_bytes) / 8] += length as u64;
        }
    }

    fn compare_counters(&self, service: usize) -> Option<Difference> {
        let memory = &self.instance.as_ref()?.memory;
        let found: [u64; COUNTER_WORDS] = std::array::from_fn(|word| memory.counter(service, word));
        let expected = self.counters[service];
        if expected == found {
            return None;
        }
        let named = |counters: &[u64; COUNTER_WORDS]| {
            let different = (0..COUNTER_WORDS).filter(|word| expected[*word] != found[*word]);
            different.map(|word| format!("{} {}", counter_name(word), counters[word])).collect::<Vec<_>>().join(", ")
        };
        compare_values(&format!("the counters of service {service}"), expected, found, named)
    }

    /// Compares all state that the comparison after each packet omits, except the flow table and the connection table,
    /// which take long to read.
    pub fn compare_state(&self) -> Option<Difference> {
        let instance = self.instance.as_ref()?;
        let memory = &instance.memory;
        let with_service = |service_slot: &usize| *service_slot == NO_SERVICE || self.model.has_service(*service_slot);
        let mut counted = (0..self.counters.len()).filter(with_service);
        let counters = counted.find_map(|service| self.compare_counters(service));
        let mut traffic = self.model.traffic().iter().filter_map(|(id, expected)| {
            let found = memory.traffic(*id);
            compare_values(&format!("the traffic of server {id}"), *expected, found, |traffic| format!("{traffic:?}"))
        });
        let services = (0..intf::MAX_SERVICES as usize).filter(|service_slot| self.model.has_service(*service_slot));
        let mut services = services.filter_map(|service_slot| self.compare_service(instance, service_slot));
        counters.or_else(|| services.next()).or_else(|| traffic.next()).or_else(|| {
            let expected = self.model.recent_placements().to_vec();
            compare_values("recent_placements", expected, memory.recent_placements(), |words| format!("{words:x?}"))
        })
    }

    fn compare_service(&self, instance: &LoadedProgram, service_slot: usize) -> Option<Difference> {
        let assigned = self.model.assigned_counts(service_slot).to_vec();
        let found = instance.lb.assigned_connections(instance.service(service_slot), assigned.len() as u16);
        let turns = (self.model.round_robin_counter(service_slot), instance.memory.round_robin(service_slot));
        compare_values("the counts of assigned connections", assigned, found, |counts| format!("{counts:?}"))
            .or_else(|| compare_values("the counter of round robin", turns.0, turns.1, u64::to_string))
    }

    /// Compares the state of the servers' clocks in a service with LB-side stamping.
    fn compare_clocks(&self, instance: &LoadedProgram, service_slot: usize) -> anyhow::Result<Option<Difference>> {
        let of_model = |clock: ServerClock| {
            [
                clock.agreeing_count.into(),
                clock.steady_samples.into(),
                clock.syn_acks,
                clock.syn_acks_with_timestamps,
                clock.disagreements,
            ]
        };
        let of_program = |clock: dataplane::ServerClock| {
            [
                clock.agreeing_connections.into(),
                clock.steady_samples.into(),
                clock.syn_acks,
                clock.with_timestamps,
                clock.disagreeing_replies,
            ]
        };
        let expected = self.model.lb_stamped(service_slot).map(|(_, known)| (known.server, of_model(known.clock)));
        let found = instance.lb.server_clocks(instance.service(service_slot))?.into_iter();
        let expected: BTreeMap<ServerId, [u64; 5]> = expected.collect();
        let found = found.map(|(id, clock)| (id, of_program(clock))).collect();
        Ok(compare_values(&format!("the clocks of service {service_slot}"), expected, found, |clocks| {
            format!("{clocks:?}")
        }))
    }

    /// Compares the flow tables, the connection tables and the servers' clocks. Fails when the kernel's tables cannot
    /// be read.
    pub fn compare_tables(&self) -> anyhow::Result<Option<Difference>> {
        let Some(instance) = &self.instance else { return Ok(None) };
        let in_use = (self.model.connections().count(), instance.lb.connections_in_use());
        let connections = self.model.connections().find_map(|expected| {
            let service_slot = usize::from(expected.identity.service);
            let service = instance.services[service_slot]?;
            let found = instance.lb.connections(service).find(|found| found.index == expected.index);
            compare_values("a connection", Some(expected), found, |connection| format!("{connection:?}"))
        });
        let connections =
            connections.or_else(|| compare_values("the entries in use", in_use.0, in_use.1, usize::to_string));
        if connections.is_some() {
            return Ok(connections);
        }
        let clocks = (0..intf::MAX_SERVICES as usize).filter(|service_slot| self.model.has_service(*service_slot));
        for service_slot in clocks.filter(|service_slot| instance.services[*service_slot].is_some()) {
            let difference = self.compare_clocks(instance, service_slot)?;
            if difference.is_some() {
                return Ok(difference);
            }
        }
        let expected = self.model.flow_table_words();
        let found = instance.memory.flow_table_words(expected.len());
        let odd = expected.iter().zip(found).enumerate().find(|(_, (expected, found))| *expected != found);
        let Some((word, (expected, found))) = odd else { return Ok(None) };
        Ok(compare_values(&format!("word {word} of the flow table"), *expected, found, |word| format!("{word:#x}")))
    }
}

fn counter_name(word: usize) -> &'static str {
    let packets = offset_of!(intf::lb_counters, packets) / 8;
    let events = offset_of!(intf::lb_counters, events) / 8;
    match word {
        word if word == offset_of!(intf::lb_counters, forwarded_bytes) / 8 => "forwarded_bytes",
        word if word == offset_of!(intf::lb_counters, opened) / 8 => "opened",
        word if word >= packets && word < events => intf::LB_COUNTER_NAMES[word - packets],
        word if word >= events => intf::LB_EVENT_NAMES.get(word - events).copied().unwrap_or("unused"),
        _ => "unused",
    }
}
