//! A load balancer both as the BPF program and as the reference model. Both get the same changes and packets, so each
//! test of the program also tests the model.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::ops::Deref;
use std::time::Duration;

use coreward_dataplane::lb::{
    self, BroadcastRateLimits, LbStampingClock, LoadBalancer, LoadBalancerOptions, OuterSourceAddresses,
    PacketRateLimit, Server, ServiceIndex,
};
use coreward_dataplane::mac::MacAddress;
use coreward_dataplane::test_run;
use coreward_intf as intf;
use coreward_model::connection_table::{
    ConnectionEntry, ConnectionExpiryReason, ConnectionTimeouts, DecisecondTicks, TableOwnerNumber,
    max_entries_per_source_prefix,
};
use coreward_model::consistency::ServiceSettings;
use coreward_model::cookie::{CookieKey, CookieKeyIndex, FleetCookieKeys};
use coreward_model::lb as model;
use coreward_model::placement::PlacementTable;
use coreward_model::vlan::Vlan;
use coreward_model::{ServerId, ServiceAddress};

const NANOSECONDS_PER_SECOND: u64 = 1_000_000_000;
const ZERO_COOKIE_KEY: CookieKey = CookieKey { k0: 0, k1: 0 };

/// Broadcast rate that no test exceeds. At a lower rate, the model and the program would differ, as their clocks do.
const UNLIMITED_BROADCAST_RATE: PacketRateLimit = PacketRateLimit { packets_per_second: 1, burst_packets: u32::MAX };

/// BPF load balancer and its reference model, whose results are compared. Reads go to the program, changes to both. A
/// change that the model does not support ends the comparison.
pub struct ModelCheckedLb {
    tested_lb: LoadBalancer,
    model: Option<RefCell<model::LoadBalancer>>,
    now_ns: Cell<u64>,
    vip_vlan: Vlan,
}

impl Deref for ModelCheckedLb {
    type Target = LoadBalancer;

    fn deref(&self) -> &LoadBalancer {
        &self.tested_lb
    }
}

fn model_with_options(lb: &LoadBalancer, options: &LoadBalancerOptions, own_mac: MacAddress) -> model::LoadBalancer {
    let unlimited_rate = model::TokenBucketRate {
        token_interval_ns: NANOSECONDS_PER_SECOND,
        burst_ns: NANOSECONDS_PER_SECOND * u64::from(UNLIMITED_BROADCAST_RATE.burst_packets - 1),
    };
    let unlimited_rates =
        model::BroadcastRates { per_source: unlimited_rate, per_service: unlimited_rate, total: unlimited_rate };
    let unspecified_sources = OuterSourceAddresses { ipv4: Ipv4Addr::UNSPECIFIED, ipv6: Ipv6Addr::UNSPECIFIED };
    let lb_settings = model::LoadBalancerSettings {
        broadcast_rates: [unlimited_rates; model::BROADCAST_REASON_COUNT],
        flow_set_count: options.flow_table_entry_count.div_ceil(intf::FLOW_SET_ENTRIES),
        connection_table_size: lb.connection_table_size(),
        counts_traffic: false,
        outer_header: model_outer_header(unspecified_sources, 0),
        vlans: model::LoadBalancerVlans { is_tagging_enabled: lb.uses_vlans(), vip_vlan: options.vip_vlan },
    };
    let zero_keys = FleetCookieKeys { keys: [ZERO_COOKIE_KEY; 2], current_key_index: CookieKeyIndex::First };
    let mut model = model::LoadBalancer::new(lb_settings, own_mac.0, zero_keys);
    model.set_connection_key(lb.connection_hash_key());
    model
}

fn model_outer_header(sources: OuterSourceAddresses, mtu: u32) -> model::OuterHeaderFields {
    model::OuterHeaderFields { source_ipv4: sources.ipv4, source_ipv6: sources.ipv6, mtu_bytes: mtu as usize }
}

fn service_slot_index(service: ServiceIndex) -> usize {
    service.as_u16().into()
}

impl ModelCheckedLb {
    /// Loads the program and its model, with unlimited broadcasts.
    pub fn load_with_model(options: LoadBalancerOptions, own_mac: MacAddress) -> Self {
        let broadcast_limits =
            [BroadcastRateLimits::with_equal_rates(UNLIMITED_BROADCAST_RATE); intf::LIMITED_KIND_COUNT as usize];
        let lb_stamping_clock = LbStampingClock::DaemonTicks;
        let options = LoadBalancerOptions { broadcast_limits, lb_stamping_clock, ..options };
        let mut checked_lb = Self::load_without_model(options.clone(), own_mac);
        checked_lb.model = Some(RefCell::new(model_with_options(&checked_lb.tested_lb, &options, own_mac)));
        checked_lb
    }

    /// Loads the program without a model, with the broadcast rates of `options`.
    pub fn load_without_model(options: LoadBalancerOptions, own_mac: MacAddress) -> Self {
        let vip_vlan = options.vip_vlan;
        let mut tested_lb = LoadBalancer::load(options).unwrap();
        tested_lb.set_own_mac(own_mac);
        Self { tested_lb, model: None, now_ns: Cell::new(1), vip_vlan }
    }

    fn change_model(&mut self, change: impl FnOnce(&mut model::LoadBalancer)) {
        if let Some(model) = &mut self.model {
            change(model.get_mut());
        }
    }

    /// Runs the program and the model on `frame`, and asserts that they agree. Returns the verdict, the packet and the
    /// model's outcome.
    pub fn process_frame(&self, frame: &[u8]) -> (i32, Vec<u8>, Option<model::FrameOutcome>) {
        let test_run::TestRunOutcome { verdict, packet, .. } =
            test_run::run_program(self.tested_lb.program_fd(), frame, 1).unwrap();
        let Some(model) = &self.model else { return (verdict, packet, None) };
        self.now_ns.set(self.now_ns.get() + 1);
        let mut model_frame = frame.to_vec();
        let model_outcome = model.borrow_mut().process_frame(&mut model_frame, self.now_ns.get());
        let expected_counter = intf::LB_COUNTER_NAMES[model_outcome.counter as usize];
        assert_eq!(
            verdict,
            model_outcome.verdict().xdp_action(),
            "the model's verdict, {expected_counter}, frame {frame:02x?}"
        );
        assert_eq!(packet, model_frame, "the model's packet, {expected_counter}, frame {frame:02x?}");
        (verdict, packet, Some(model_outcome))
    }

    pub fn set_cookie_keys(&mut self, keys: &FleetCookieKeys) {
        self.tested_lb.set_cookie_keys(keys);
        self.change_model(|model| model.set_cookie_keys(*keys));
    }

    pub fn set_services(
        &mut self,
        services: &[(ServiceAddress, ServiceSettings)],
    ) -> anyhow::Result<Vec<ServiceIndex>> {
        let service_indexes = self.tested_lb.set_services(services)?;
        let slot_indexes: Vec<usize> = service_indexes.iter().map(|index| service_slot_index(*index)).collect();
        self.change_model(|model| assert_eq!(model.set_services(services), slot_indexes, "the services' slots"));
        Ok(service_indexes)
    }

    pub fn set_time_key(&mut self, service: ServiceIndex, key: CookieKey) {
        self.tested_lb.set_time_key(service, key);
        self.change_model(|model| model.set_time_key(service_slot_index(service), key));
    }

    pub fn set_server(&mut self, service: ServiceIndex, id: ServerId, server: Server) {
        self.tested_lb.set_server(service, id, server);
        let model_server = model::ServerMapEntry { mac: server.mac.map(|mac| mac.0), is_eligible: server.is_eligible };
        self.change_model(|model| model.set_server(service_slot_index(service), id, Some(model_server)));
    }

    pub fn remove_server(&mut self, service: ServiceIndex, id: ServerId) {
        self.tested_lb.remove_server(service, id);
        self.change_model(|model| model.set_server(service_slot_index(service), id, None));
    }

    pub fn set_server_masked(&mut self, service: ServiceIndex, id: ServerId, is_masked: bool) {
        self.tested_lb.set_server_masked(service, id, is_masked);
        self.change_model(|model| model.set_server_locally_down(service_slot_index(service), id, is_masked));
    }

    pub fn install_table(&mut self, service: ServiceIndex, table: &PlacementTable) -> anyhow::Result<()> {
        self.tested_lb.install_table(service, table)?;
        self.change_model(|model| model.install_table(service_slot_index(service), table.clone()));
        Ok(())
    }

    pub fn set_outer_header(&mut self, sources: OuterSourceAddresses, mtu: u32) {
        self.tested_lb.set_outer_sources_and_mtu(sources, mtu);
        self.change_model(|model| model.set_outer_header(model_outer_header(sources, mtu)));
    }

    pub fn set_server_tunnel(&mut self, id: ServerId, tunnel: lb::ServerTunnel) -> anyhow::Result<()> {
        let lb::ServerTunnel { destination_address: address, source_port } = tunnel;
        self.tested_lb.set_server_tunnel(id, tunnel)?;
        self.change_model(|model| model.set_tunnel_endpoint(id, model::TunnelEndpoint { address, source_port }));
        Ok(())
    }

    pub fn enable_server_vlans(&mut self, vlans: BTreeSet<Vlan>) -> anyhow::Result<()> {
        self.tested_lb.enable_server_vlans(vlans)?;
        let model_vlans =
            model::LoadBalancerVlans { is_tagging_enabled: self.tested_lb.uses_vlans(), vip_vlan: self.vip_vlan };
        self.change_model(|model| model.set_vlans(model_vlans));
        Ok(())
    }

    pub fn set_server_vlan(&mut self, id: ServerId, vlan: Vlan) {
        self.tested_lb.set_server_vlan(id, vlan);
        self.change_model(|model| model.set_server_vlan(id, vlan));
    }

    pub fn set_broadcast_vlan(&mut self, service: ServiceIndex, vlan: Option<Vlan>) {
        self.tested_lb.set_broadcast_vlan(service, vlan);
        self.change_model(|model| model.set_broadcast_vlan(service_slot_index(service), vlan));
    }

    pub fn set_owner_number(&mut self, owner: Option<TableOwnerNumber>) {
        self.tested_lb.set_owner_number(owner);
        self.change_model(|model| model.set_owner_number(owner));
    }

    pub fn set_owner_mac(&mut self, owner: TableOwnerNumber, mac: Option<MacAddress>) {
        self.tested_lb.set_owner_mac(owner, mac);
        let model_owner =
            mac.map_or(model::TableOwnerReachability::Lost, |mac| model::TableOwnerReachability::Reachable(mac.0));
        self.change_model(|model| model.set_other_owner_reachability(owner, model_owner));
    }

    pub fn remove_owner(&mut self, owner: TableOwnerNumber) {
        self.tested_lb.remove_owner(owner);
        self.change_model(|model| model.set_other_owner_reachability(owner, model::TableOwnerReachability::Unknown));
    }

    pub fn tick_packet_clock(&mut self, monotonic_time: Duration) {
        self.tested_lb.tick_packet_clock(monotonic_time);
        self.change_model(|model| model.set_current_time(DecisecondTicks::from_monotonic_time(monotonic_time)));
    }

    pub fn scan_expired_connections(
        &mut self,
        timeouts: &ConnectionTimeouts,
        entries_to_scan: u32,
    ) -> Vec<(ConnectionEntry, ConnectionExpiryReason)> {
        self.change_model(model::LoadBalancer::record_connection_table_sweep);
        self.tested_lb.scan_expired_connections(timeouts, entries_to_scan)
    }

    pub fn free_connections(&mut self, connections: &[ConnectionEntry]) -> anyhow::Result<usize> {
        self.change_model(|model| model.free_unchanged_connections(connections));
        self.tested_lb.free_connections(connections)
    }

    pub fn update_source_prefix_limit(&mut self) {
        let source_entry_limit = max_entries_per_source_prefix(
            self.tested_lb.connection_table_size(),
            self.tested_lb.used_entry_count() as u32,
        );
        self.tested_lb.update_source_prefix_limit();
        self.change_model(|model| {
            model.set_max_entries_per_source((source_entry_limit != 0).then_some(source_entry_limit))
        });
    }

    pub fn recount_connections(&mut self) {
        self.tested_lb.recount_connections();
    }

    pub fn set_server_traffic_counting(&mut self, is_enabled: bool) -> anyhow::Result<()> {
        self.tested_lb.set_server_traffic_counting(is_enabled)?;
        self.change_model(|model| model.set_server_traffic_counting(is_enabled));
        Ok(())
    }

    /// Ends the comparison with the model, for tests whose packets do not all pass through
    /// [`process_frame`](Self::process_frame).
    pub fn drop_model(&mut self) {
        self.model = None;
    }

    /// Sets the MAC address, which ends the comparison with the model.
    pub fn set_own_mac(&mut self, mac: MacAddress) {
        self.drop_model();
        self.tested_lb.set_own_mac(mac);
    }

    /// Replaces the candidates of a table, which ends the comparison with the model.
    pub fn replace_candidates(
        &mut self,
        service: ServiceIndex,
        choose: impl FnOnce(&PlacementTable) -> PlacementTable,
    ) -> anyhow::Result<()> {
        self.drop_model();
        self.tested_lb.replace_candidates(service, choose)
    }
}
