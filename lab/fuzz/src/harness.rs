//! Test harness, which applies the same changes and packets to a load balancer's BPF program and its reference model.

use std::collections::BTreeMap;
use std::mem::offset_of;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use coreward_dataplane::lb::{self as dataplane, OuterSourceAddresses, PacketRateLimit, ServiceIndex};
use coreward_dataplane::mac;
use coreward_dataplane::test_run;
use coreward_intf as intf;
use coreward_model::connection_table::{ConnectionEntry, ConnectionTableSize, ConnectionTimeouts, TableOwnerNumber};
use coreward_model::consistency::{CookieStamper, ServiceSettings};
use coreward_model::cookie::{CookieKey, FleetCookieKeys};
use coreward_model::lb::{
    BROADCAST_REASON_COUNT, BroadcastRates, FrameOutcome, LoadBalancer, LoadBalancerSettings, LoadBalancerVlans,
    MacAddress, OuterHeaderFields, ServerMapEntry, TableOwnerReachability, TokenBucketRate, TunnelEndpoint, XdpVerdict,
};
use coreward_model::lb_stamping::ServerClock;
use coreward_model::{ServerId, ServiceAddress};

use crate::frame::{ETHERNET_HEADER_BYTES, format_hex, ones_complement_sum, strip_vlan_tag};
use crate::guarantees::ForwardingGuaranteeChecker;
use crate::program_maps::{COUNTER_U64_COUNT, ProgramMaps};
use crate::server_networks::{SERVER_VLAN_IDS, broadcast_vlan, server_tunnel_endpoint, server_vlan, vlan_from_id};
use crate::state_change::{LoadBalancerStateChange, ModelDifference};

/// XDP action, from linux/bpf.h, that sends the packet back out of the device on which it arrived.
const XDP_TX: i32 = 3;
const NO_SERVICE_SLOT: usize = intf::LB_COUNTERS_NO_SERVICE as usize;

/// MAC address of the load balancer in tests with a single load balancer.
pub const LOAD_BALANCER_MAC: MacAddress = [2, 0, 0, 0, 0, 1];
/// Timestamp key of all servers, and of all services with LB-side stamping.
pub const TIME_KEY: CookieKey = CookieKey { k0: 5, k1: 6 };

/// Broadcast rate of one packet per second, with a burst that never runs out. Whether a token is available therefore
/// depends on the state ([`LoadBalancerStateChange::SetHasBroadcastTokens`]), not on the time.
const BROADCAST_RATE: PacketRateLimit = PacketRateLimit { packets_per_second: 1, burst_packets: u32::MAX };
const BROADCAST_INTERVAL_NS: u64 = 1_000_000_000;

/// Settings with which the BPF program is loaded.
#[derive(Debug, Clone, Copy)]
pub struct FuzzHarnessSetup {
    /// MAC address of the load balancer, which is the destination of received frames and the source of sent ones.
    pub own_mac: MacAddress,
    pub cookie_keys: FleetCookieKeys,
    /// Whether the program counts packets and bytes of each server.
    pub counts_traffic: bool,
    /// Size of the connection table, which stateful services use.
    pub connection_table_size: ConnectionTableSize,
    pub connection_key: CookieKey,
    pub flow_set_count: u32,
    /// Fields that are the same in the outer headers of all encapsulated packets.
    pub outer_header: OuterHeaderFields,
    /// VLANs in use. Without any, all servers are untagged.
    pub vlans: LoadBalancerVlans,
}

/// Default values of the fields that are the same in the outer headers of all encapsulated packets.
const DEFAULT_OUTER_HEADER: OuterHeaderFields = OuterHeaderFields {
    source_ipv4: Ipv4Addr::new(10, 2, 0, 1),
    source_ipv6: Ipv6Addr::new(0x2001, 0xdb8, 2, 0, 0, 0, 0, 1),
    mtu_bytes: 1500,
};

impl FuzzHarnessSetup {
    /// Returns the default setup of a load balancer with this MAC address and these keys.
    pub fn new(own_mac: MacAddress, cookie_keys: FleetCookieKeys) -> Self {
        let connection_key = CookieKey { k0: 0x5d3c_91ab_04e7_aa13, k1: 0x0f1e_77c9_d2b4_5a61 };
        let (connection_table_size, flow_set_count) = (ConnectionTableSize::default(), 1 << 15);
        Self {
            own_mac,
            cookie_keys,
            counts_traffic: false,
            connection_table_size,
            connection_key,
            flow_set_count,
            outer_header: DEFAULT_OUTER_HEADER,
            vlans: LoadBalancerVlans::default(),
        }
    }
}

/// Loaded BPF program, with the load balancer in user space that manages it.
pub struct LoadedBpfProgram {
    load_balancer: dataplane::LoadBalancer,
    program_maps: ProgramMaps,
    service_index_by_slot: Vec<Option<ServiceIndex>>,
    processed_frame: Vec<u8>,
}

impl LoadedBpfProgram {
    /// Loads the BPF program. Fails without the necessary capabilities.
    pub fn load(setup: &FuzzHarnessSetup) -> anyhow::Result<Self> {
        let connection_table_size = setup.connection_table_size;
        let options = dataplane::LoadBalancerOptions {
            broadcast_limits: [dataplane::BroadcastRateLimits::with_equal_rates(BROADCAST_RATE);
                BROADCAST_REASON_COUNT],
            flow_table_entry_count: setup.flow_set_count * intf::FLOW_SET_ENTRIES,
            connection_table_size,
            connection_hash_key: Some(setup.connection_key),
            vip_vlan: setup.vlans.vip_vlan,
            // With this clock, the reference model sees the same time.
            lb_stamping_clock: dataplane::LbStampingClock::DaemonTicks,
            ..Default::default()
        };
        let mut load_balancer = dataplane::LoadBalancer::load(options)?;
        load_balancer.set_own_mac(mac::MacAddress(setup.own_mac));
        load_balancer.set_cookie_keys(&setup.cookie_keys);
        let outer_sources =
            OuterSourceAddresses { ipv4: setup.outer_header.source_ipv4, ipv6: setup.outer_header.source_ipv6 };
        load_balancer.set_outer_sources_and_mtu(outer_sources, setup.outer_header.mtu_bytes as u32);
        load_balancer.set_server_traffic_counting(setup.counts_traffic)?;
        if setup.vlans.is_tagging_enabled {
            load_balancer.enable_server_vlans(SERVER_VLAN_IDS.iter().map(|id| vlan_from_id(*id)).collect())?;
        }
        let program_maps = ProgramMaps::for_program(load_balancer.program_fd())?;
        let service_index_by_slot = vec![None; intf::MAX_SERVICES as usize];
        Ok(Self { load_balancer, program_maps, service_index_by_slot, processed_frame: vec![0; 1 << 14] })
    }

    fn service_index(&self, service_slot: usize) -> ServiceIndex {
        self.service_index_by_slot[service_slot].expect("a service that was set")
    }

    /// Applies a change to the program. `service_slots` are the slots that the reference model has assigned to the
    /// services of a [`LoadBalancerStateChange::ReplaceServices`]. `freed_connections` are the connections of a
    /// [`LoadBalancerStateChange::FreeConnectionEntries`].
    fn apply_change(
        &mut self,
        change: &LoadBalancerStateChange,
        service_slots: &[usize],
        freed_connections: &[ConnectionEntry],
    ) -> anyhow::Result<()> {
        match change {
            LoadBalancerStateChange::SetCookieKeys(keys) => self.load_balancer.set_cookie_keys(keys),
            LoadBalancerStateChange::ReplaceServices(services) => self.replace_services(services, service_slots)?,
            LoadBalancerStateChange::SetServer(service_slot, id, server) => {
                self.set_server(*service_slot, *id, *server)?
            }
            LoadBalancerStateChange::SetServerMasked(service_slot, id, is_masked) => {
                self.load_balancer.set_server_masked(self.service_index(*service_slot), *id, *is_masked)
            }
            LoadBalancerStateChange::InstallPlacementTable(service_slot, table) => {
                self.load_balancer.install_table(self.service_index(*service_slot), table)?
            }
            LoadBalancerStateChange::SetHasBroadcastTokens(buckets, has_tokens) => {
                self.program_maps.set_tokens_paid_until(*buckets, tokens_paid_until_ns(*has_tokens))
            }
            LoadBalancerStateChange::SetLocalOwnerNumber(owner_number) => {
                self.load_balancer.set_owner_number(*owner_number)
            }
            LoadBalancerStateChange::LimitEntriesPerPrefix(max_entries) => {
                self.program_maps.limit_entries_per_source(*max_entries)
            }
            LoadBalancerStateChange::SetTableOwner(owner_number, owner) => self.set_table_owner(*owner_number, *owner),
            LoadBalancerStateChange::SetClock(clock) => {
                self.load_balancer.tick_packet_clock(Duration::from_millis(u64::from(clock.0) * 100))
            }
            LoadBalancerStateChange::SweepExpiredEntries => {
                drop(self.load_balancer.scan_expired_connections(&ConnectionTimeouts::default(), 0))
            }
            LoadBalancerStateChange::FreeConnectionEntries(_) => {
                let freed_count = self.load_balancer.free_connections(freed_connections)?;
                ensure!(
                    freed_count == freed_connections.len(),
                    "{freed_count} of {} entries were freed",
                    freed_connections.len()
                );
            }
        }
        Ok(())
    }

    fn replace_services(
        &mut self,
        services: &[(ServiceAddress, ServiceSettings)],
        service_slots: &[usize],
    ) -> anyhow::Result<()> {
        let service_indexes = self.load_balancer.set_services(services)?;
        self.service_index_by_slot.fill(None);
        for (((_, mode), service_slot), service_index) in services.iter().zip(service_slots).zip(service_indexes) {
            if mode.timestamps == CookieStamper::LoadBalancer {
                self.load_balancer.set_time_key(service_index, TIME_KEY);
            }
            self.service_index_by_slot[*service_slot] = Some(service_index);
            self.load_balancer.set_broadcast_vlan(service_index, broadcast_vlan(*service_slot));
        }
        Ok(())
    }

    fn set_server(&mut self, service_slot: usize, id: ServerId, server: Option<ServerMapEntry>) -> anyhow::Result<()> {
        let service_index = self.service_index(service_slot);
        let Some(server) = server else {
            self.load_balancer.remove_server(service_index, id);
            return Ok(());
        };
        let server = dataplane::Server { mac: server.mac.map(mac::MacAddress), is_eligible: server.is_eligible };
        self.load_balancer.set_server(service_index, id, server);
        let TunnelEndpoint { address, source_port } = server_tunnel_endpoint(id);
        self.load_balancer
            .set_server_tunnel(id, dataplane::ServerTunnel { destination_address: address, source_port })?;
        self.load_balancer.set_server_vlan(id, server_vlan(id));
        Ok(())
    }

    fn set_table_owner(&mut self, owner_number: TableOwnerNumber, owner: TableOwnerReachability) {
        match owner {
            TableOwnerReachability::Unknown => self.load_balancer.remove_owner(owner_number),
            TableOwnerReachability::Lost => self.load_balancer.set_owner_mac(owner_number, None),
            TableOwnerReachability::Reachable(mac) => {
                self.load_balancer.set_owner_mac(owner_number, Some(mac::MacAddress(mac)))
            }
        }
    }

    fn process_frame(&mut self, frame: &[u8]) -> anyhow::Result<(i32, usize)> {
        test_run::run_program_into_buffer(self.load_balancer.program_fd(), frame, &mut self.processed_frame)
            .with_context(|| format!("a test run of {} bytes", frame.len()))
    }
}

fn tokens_paid_until_ns(has_tokens: bool) -> u64 {
    if has_tokens { 0 } else { u64::MAX }
}

fn compare_values<T: PartialEq>(
    subject: &str,
    expected: T,
    actual: T,
    to_text: impl Fn(&T) -> String,
) -> Option<ModelDifference> {
    (expected != actual).then(|| ModelDifference {
        compared_item: subject.to_owned(),
        reference_model_result: to_text(&expected),
        bpf_program_result: to_text(&actual),
    })
}

/// Returns a difference if the program has broken the checksum of an IPv4 header, which was correct in `frame_before`.
fn find_broken_checksum(frame_before: &[u8], frame_after: &[u8]) -> Option<ModelDifference> {
    let has_correct_checksum =
        |frame: &[u8]| ones_complement_sum(&frame[ETHERNET_HEADER_BYTES..ETHERNET_HEADER_BYTES + 20], 0) == 0xffff;
    // Only headers without options are checked, because the program never changes others. An outer IPv6 header has no
    // checksum.
    let has_plain_ipv4_header =
        |frame: &[u8]| frame.len() >= ETHERNET_HEADER_BYTES + 20 && frame[ETHERNET_HEADER_BYTES] == 0x45;
    let is_packet_changed = has_plain_ipv4_header(frame_before)
        && has_plain_ipv4_header(frame_after)
        && frame_before[ETHERNET_HEADER_BYTES..] != frame_after[ETHERNET_HEADER_BYTES..];
    (is_packet_changed && has_correct_checksum(frame_before) && !has_correct_checksum(frame_after)).then(|| {
        ModelDifference {
            compared_item: "an IP header checksum was right and is not any more".to_owned(),
            reference_model_result: format_hex(frame_before),
            bpf_program_result: format_hex(frame_after),
        }
    })
}

/// BPF program and its reference model, to which the same changes and packets are applied.
pub struct FuzzHarness {
    pub model: LoadBalancer,
    /// Loaded BPF program, or `None` when only the reference model runs.
    program: Option<LoadedBpfProgram>,
    /// Expected counters of each service, and of packets without a service.
    expected_counters: Vec<[u64; COUNTER_U64_COUNT]>,
    /// Last frame, as it must be after processing according to the reference model.
    expected_frame: Vec<u8>,
    guarantee_checker: ForwardingGuaranteeChecker,
    now_ns: u64,
}

impl FuzzHarness {
    /// Returns a harness with empty state. If `runs_bpf_program` is true, also loads the BPF program, which needs
    /// capabilities.
    pub fn new(setup: FuzzHarnessSetup, runs_bpf_program: bool) -> anyhow::Result<Self> {
        let burst_ns = BROADCAST_INTERVAL_NS * u64::from(BROADCAST_RATE.burst_packets - 1);
        let broadcast_rate = TokenBucketRate { token_interval_ns: BROADCAST_INTERVAL_NS, burst_ns };
        let settings = LoadBalancerSettings {
            broadcast_rates: [BroadcastRates {
                per_source: broadcast_rate,
                per_service: broadcast_rate,
                total: broadcast_rate,
            }; BROADCAST_REASON_COUNT],
            flow_set_count: setup.flow_set_count,
            connection_table_size: setup.connection_table_size,
            counts_traffic: setup.counts_traffic,
            outer_header: setup.outer_header,
            vlans: setup.vlans,
        };
        let mut model = LoadBalancer::new(settings, setup.own_mac, setup.cookie_keys);
        model.set_connection_key(setup.connection_key);
        Ok(Self {
            program: runs_bpf_program.then(|| LoadedBpfProgram::load(&setup)).transpose()?,
            model,
            expected_counters: vec![[0; COUNTER_U64_COUNT]; intf::MAX_SERVICES as usize + 1],
            expected_frame: Vec::new(),
            guarantee_checker: ForwardingGuaranteeChecker::default(),
            now_ns: 1,
        })
    }

    /// Applies `change` to the program and the model. Returns the slots of a
    /// [`LoadBalancerStateChange::ReplaceServices`]. Fails when the kernel or the load balancer rejects the change.
    pub fn apply_change(&mut self, change: &LoadBalancerStateChange) -> anyhow::Result<Vec<usize>> {
        let mut service_slots = Vec::new();
        let freed_connections: Vec<ConnectionEntry> = match change {
            LoadBalancerStateChange::FreeConnectionEntries(indexes) => {
                indexes.iter().filter_map(|index| self.model.connection_at(*index)).collect()
            }
            _ => Vec::new(),
        };
        match change {
            LoadBalancerStateChange::SetCookieKeys(keys) => self.model.set_cookie_keys(*keys),
            LoadBalancerStateChange::ReplaceServices(services) => service_slots = self.replace_services(services),
            LoadBalancerStateChange::SetServer(service_slot, id, server) => {
                self.model.set_tunnel_endpoint(*id, server_tunnel_endpoint(*id));
                self.model.set_server_vlan(*id, server_vlan(*id));
                self.model.set_server(*service_slot, *id, *server);
            }
            LoadBalancerStateChange::SetServerMasked(service_slot, id, is_masked) => {
                self.model.set_server_locally_down(*service_slot, *id, *is_masked)
            }
            LoadBalancerStateChange::InstallPlacementTable(service_slot, table) => {
                self.model.install_table(*service_slot, table.clone())
            }
            LoadBalancerStateChange::SetHasBroadcastTokens(buckets, has_tokens) => {
                self.model.set_token_bucket_paid_until(*buckets, tokens_paid_until_ns(*has_tokens))
            }
            LoadBalancerStateChange::SetLocalOwnerNumber(owner_number) => self.model.set_owner_number(*owner_number),
            LoadBalancerStateChange::LimitEntriesPerPrefix(max_entries) => {
                self.model.set_max_entries_per_source(*max_entries)
            }
            LoadBalancerStateChange::SetTableOwner(owner_number, owner) => {
                self.model.set_other_owner_reachability(*owner_number, *owner)
            }
            LoadBalancerStateChange::SetClock(clock) => self.model.set_current_time(*clock),
            LoadBalancerStateChange::SweepExpiredEntries => self.model.record_connection_table_sweep(),
            LoadBalancerStateChange::FreeConnectionEntries(_) => {
                self.model.free_unchanged_connections(&freed_connections)
            }
        }
        if let Some(program) = &mut self.program {
            program.apply_change(change, &service_slots, &freed_connections)?;
        }
        self.guarantee_checker.apply_change(change, &service_slots);
        Ok(service_slots)
    }

    /// Replaces the model's services and returns their slots. The counters of a new service start at zero.
    fn replace_services(&mut self, services: &[(ServiceAddress, ServiceSettings)]) -> Vec<usize> {
        let previous_addresses: Vec<_> =
            (0..NO_SERVICE_SLOT).map(|service_slot| self.model.service_address(service_slot)).collect();
        let service_slots = self.model.set_services(services);
        for ((_, mode), service_slot) in services.iter().zip(&service_slots) {
            if previous_addresses[*service_slot] != self.model.service_address(*service_slot) {
                self.expected_counters[*service_slot] = [0; COUNTER_U64_COUNT];
            }
            self.model.set_broadcast_vlan(*service_slot, broadcast_vlan(*service_slot));
            if mode.timestamps == CookieStamper::LoadBalancer {
                self.model.set_time_key(*service_slot, TIME_KEY);
            }
        }
        service_slots
    }

    /// Returns whether the service that `change` refers to exists.
    pub fn is_applicable(&self, change: &LoadBalancerStateChange) -> bool {
        match change {
            LoadBalancerStateChange::SetServer(service_slot, ..)
            | LoadBalancerStateChange::SetServerMasked(service_slot, ..)
            | LoadBalancerStateChange::InstallPlacementTable(service_slot, _) => self.model.has_service(*service_slot),
            _ => true,
        }
    }

    /// Processes `frame` in the program and in the model. Returns the model's outcome, and any difference between the
    /// two. Fails when the kernel rejects the test run.
    pub fn process_packet(&mut self, frame: &[u8]) -> anyhow::Result<(FrameOutcome, Option<ModelDifference>)> {
        self.now_ns += 1;
        self.expected_frame.clear();
        self.expected_frame.extend_from_slice(frame);
        let outcome = self.model.process_frame(&mut self.expected_frame, self.now_ns);
        let (untagged_input, untagged_output) =
            (strip_vlan_tag(frame), strip_vlan_tag(&self.expected_frame).into_owned());
        self.update_expected_counters(&outcome, untagged_input.len());
        let Some(program) = &mut self.program else { return Ok((outcome, None)) };
        let (actual_verdict, output_bytes) = program.process_frame(frame)?;
        let exceeds_mtu =
            [intf::LB_COUNTER_DROP_EXCEEDS_MTU, intf::LB_COUNTER_DROP_FRAGMENTATION_NEEDED].contains(&outcome.counter);
        let is_forwarded = actual_verdict == XDP_TX && !exceeds_mtu;
        let actual_frame = &program.processed_frame[..output_bytes];
        let broken_guarantee =
            if is_forwarded { self.guarantee_checker.find_violation(&untagged_input, actual_frame) } else { None };
        if exceeds_mtu {
            self.guarantee_checker.record_dropped_datagram_flow(&untagged_input);
        }
        let expected_verdict = outcome.verdict().xdp_action();
        let difference = broken_guarantee
            .or_else(|| {
                compare_values(
                    "the verdict (1: drop, 2: pass, 3: transmit)",
                    expected_verdict,
                    actual_verdict,
                    i32::to_string,
                )
            })
            .or_else(|| compare_values("the packet", &self.expected_frame[..], actual_frame, |bytes| format_hex(bytes)))
            .or_else(|| find_broken_checksum(&untagged_input, &untagged_output))
            .or_else(|| self.compare_counters(outcome.service_slot.unwrap_or(NO_SERVICE_SLOT)));
        Ok((outcome, difference))
    }

    /// Returns the last frame that [`process_packet`](Self::process_packet) has received, as the reference model has
    /// changed it.
    pub fn last_model_frame(&self) -> &[u8] {
        &self.expected_frame
    }

    fn update_expected_counters(&mut self, outcome: &FrameOutcome, packet_bytes: usize) {
        let counters_index = outcome.service_slot.unwrap_or(NO_SERVICE_SLOT);
        let counter_words = &mut self.expected_counters[counters_index];
        counter_words[offset_of!(intf::lb_counters, packets) / 8 + outcome.counter as usize] += 1;
        if let Some(event) = outcome.event {
            counter_words[offset_of!(intf::lb_counters, events) / 8 + event as usize] += 1;
        }
        if outcome.service_slot.is_some() {
            counter_words[offset_of!(intf::lb_counters, opened) / 8] =
                self.model.opened_connection_count(counters_index);
        }
        if outcome.verdict() == XdpVerdict::Transmit && outcome.counter != intf::LB_COUNTER_DROP_FRAGMENTATION_NEEDED {
            counter_words[offset_of!(intf::lb_counters, forwarded_bytes) / 8] += packet_bytes as u64;
        }
    }

    fn compare_counters(&self, service_slot: usize) -> Option<ModelDifference> {
        let program_maps = &self.program.as_ref()?.program_maps;
        let actual_counters: [u64; COUNTER_U64_COUNT] =
            std::array::from_fn(|word_index| program_maps.service_counter_word(service_slot, word_index));
        let service_counters = self.expected_counters[service_slot];
        if service_counters == actual_counters {
            return None;
        }
        let format_different_counters = |counters: &[u64; COUNTER_U64_COUNT]| {
            let different_words = (0..COUNTER_U64_COUNT)
                .filter(|word_index| service_counters[*word_index] != actual_counters[*word_index]);
            different_words
                .map(|word_index| format!("{} {}", counter_word_name(word_index), counters[word_index]))
                .collect::<Vec<_>>()
                .join(", ")
        };
        compare_values(
            &format!("the counters of service {service_slot}"),
            service_counters,
            actual_counters,
            format_different_counters,
        )
    }

    /// Compares counters, traffic, connection counts and recent placements of the program and of the model. Omits the
    /// tables that take long to read ([`compare_large_tables`](Self::compare_large_tables)).
    pub fn compare_state(&self) -> Option<ModelDifference> {
        let program = self.program.as_ref()?;
        let program_maps = &program.program_maps;
        let is_compared_slot =
            |service_slot: &usize| *service_slot == NO_SERVICE_SLOT || self.model.has_service(*service_slot);
        let mut compared_slots = (0..self.expected_counters.len()).filter(is_compared_slot);
        let counter_difference = compared_slots.find_map(|service_slot| self.compare_counters(service_slot));
        let mut traffic_differences = self.model.traffic_by_server().iter().filter_map(|(id, expected)| {
            let actual_traffic = program_maps.traffic_of_server(*id);
            compare_values(&format!("the traffic of server {id}"), *expected, actual_traffic, |traffic| {
                format!("{traffic:?}")
            })
        });
        let service_slots =
            (0..intf::MAX_SERVICES as usize).filter(|service_slot| self.model.has_service(*service_slot));
        let mut service_differences =
            service_slots.filter_map(|service_slot| self.compare_service(program, service_slot));
        counter_difference.or_else(|| service_differences.next()).or_else(|| traffic_differences.next()).or_else(|| {
            let expected_placements = self.model.recent_placement_words().to_vec();
            compare_values(
                "recent_placements",
                expected_placements,
                program_maps.recent_placement_words(),
                |placement_words| format!("{placement_words:x?}"),
            )
        })
    }

    fn compare_service(&self, program: &LoadedBpfProgram, service_slot: usize) -> Option<ModelDifference> {
        let assigned_counts = self.model.assigned_connections_by_core_slot(service_slot).to_vec();
        let actual_counts = program
            .load_balancer
            .assigned_connection_counts(program.service_index(service_slot), assigned_counts.len() as u16);
        let round_robin_counters =
            (self.model.round_robin_counter(service_slot), program.program_maps.round_robin_counter(service_slot));
        compare_values("the counts of assigned connections", assigned_counts, actual_counts, |counts| {
            format!("{counts:?}")
        })
        .or_else(|| {
            compare_values("the counter of round robin", round_robin_counters.0, round_robin_counters.1, u64::to_string)
        })
    }

    /// Compares the program's measurements of the servers' clocks with the model's, for a service with LB-side
    /// stamping.
    fn compare_server_clocks(
        &self,
        program: &LoadedBpfProgram,
        service_slot: usize,
    ) -> anyhow::Result<Option<ModelDifference>> {
        let model_clock_values = |clock: ServerClock| {
            [
                clock.agreeing_syn_ack_count.into(),
                clock.steady_sample_count.into(),
                clock.syn_ack_count,
                clock.timestamped_syn_ack_count,
                clock.offset_disagreement_count,
            ]
        };
        let program_clock_values = |clock: dataplane::ServerClockMeasurements| {
            [
                clock.agreeing_connection_count.into(),
                clock.steady_sample_count.into(),
                clock.syn_ack_count,
                clock.timestamped_syn_ack_count,
                clock.disagreeing_syn_ack_count,
            ]
        };
        let model_clocks = self
            .model
            .lb_stamped_servers(service_slot)
            .map(|(_, stamped_server)| (stamped_server.server, model_clock_values(stamped_server.clock)));
        let program_clocks =
            program.load_balancer.server_clock_measurements(program.service_index(service_slot))?.into_iter();
        let expected_by_server: BTreeMap<ServerId, [u64; 5]> = model_clocks.collect();
        let actual_by_server = program_clocks.map(|(id, clock)| (id, program_clock_values(clock))).collect();
        Ok(compare_values(
            &format!("the clocks of service {service_slot}"),
            expected_by_server,
            actual_by_server,
            |clocks| format!("{clocks:?}"),
        ))
    }

    /// Compares the program's flow table, connection table and measurements of servers' clocks with the model's. Fails
    /// when the kernel's tables cannot be read.
    pub fn compare_large_tables(&self) -> anyhow::Result<Option<ModelDifference>> {
        let Some(program) = &self.program else { return Ok(None) };
        let used_entry_counts = (self.model.connections().count(), program.load_balancer.count_used_entries_by_scan());
        let connection_difference = self.model.connections().find_map(|expected| {
            let service_slot = usize::from(expected.identity.service_slot);
            let service_index = program.service_index_by_slot[service_slot]?;
            let actual_connection =
                program.load_balancer.connections(service_index).find(|actual| actual.index == expected.index);
            compare_values("a connection", Some(expected), actual_connection, |connection| format!("{connection:?}"))
        });
        let connection_difference = connection_difference.or_else(|| {
            compare_values("the entries in use", used_entry_counts.0, used_entry_counts.1, usize::to_string)
        });
        if connection_difference.is_some() {
            return Ok(connection_difference);
        }
        let service_slots =
            (0..intf::MAX_SERVICES as usize).filter(|service_slot| self.model.has_service(*service_slot));
        for service_slot in service_slots.filter(|service_slot| program.service_index_by_slot[*service_slot].is_some())
        {
            let difference = self.compare_server_clocks(program, service_slot)?;
            if difference.is_some() {
                return Ok(difference);
            }
        }
        let expected_words = self.model.flow_table_words();
        let actual_words = program.program_maps.flow_table_words(expected_words.len());
        let different_word =
            expected_words.iter().zip(actual_words).enumerate().find(|(_, (expected, actual))| *expected != actual);
        let Some((word_index, (expected, actual))) = different_word else { return Ok(None) };
        Ok(compare_values(&format!("word {word_index} of the flow table"), *expected, actual, |word_value| {
            format!("{word_value:#x}")
        }))
    }
}

fn counter_word_name(word_index: usize) -> &'static str {
    let first_packet_word = offset_of!(intf::lb_counters, packets) / 8;
    let first_event_word = offset_of!(intf::lb_counters, events) / 8;
    match word_index {
        word_index if word_index == offset_of!(intf::lb_counters, forwarded_bytes) / 8 => "forwarded_bytes",
        word_index if word_index == offset_of!(intf::lb_counters, opened) / 8 => "opened",
        word_index if word_index >= first_packet_word && word_index < first_event_word => {
            intf::LB_COUNTER_NAMES[word_index - first_packet_word]
        }
        word_index if word_index >= first_event_word => {
            intf::LB_EVENT_NAMES.get(word_index - first_event_word).copied().unwrap_or("unused")
        }
        _ => "unused",
    }
}
