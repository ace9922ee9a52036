//! A load balancer as BPF program and as reference model. Both get the same changes and packets, so each test of the
//! program also tests the model.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::ops::Deref;
use std::time::Duration;

use coreward_dataplane::lb::{
    self, BroadcastRates, LbStampingClock, LoadBalancer, Options, OuterSources, PacketRate, Server, ServiceIndex,
};
use coreward_dataplane::mac::MacAddress;
use coreward_dataplane::test_run;
use coreward_intf as intf;
use coreward_model::connection_table::{
    ClockTicks, Connection, ExpiryReason, OwnerNumber, Timeouts, entries_per_source,
};
use coreward_model::consistency::ServiceMode;
use coreward_model::cookie::{CookieKey, FleetKeys, KeyIndex};
use coreward_model::lb as model;
use coreward_model::placement::PlacementTable;
use coreward_model::vlan::Vlan;
use coreward_model::{ServerId, ServiceAddress};

const NANOSECONDS: u64 = 1_000_000_000;
const NO_KEY: CookieKey = CookieKey { k0: 0, k1: 0 };

/// Broadcast rate that no test exceeds. The model has another clock, so it would limit different packets.
const UNLIMITED: PacketRate = PacketRate { per_second: 1, burst: u32::MAX };

/// BPF program and model. Reads go to the program, changes to both; a change that the model lacks ends the comparison.
pub struct ComparedLb {
    lb: LoadBalancer,
    model: Option<RefCell<model::LoadBalancer>>,
    now_ns: Cell<u64>,
    vip_vlan: Vlan,
}

impl Deref for ComparedLb {
    type Target = LoadBalancer;

    fn deref(&self) -> &LoadBalancer {
        &self.lb
    }
}

fn model_of(lb: &LoadBalancer, options: &Options, own_mac: MacAddress) -> model::LoadBalancer {
    let rate = model::Rate { interval_ns: NANOSECONDS, burst_ns: NANOSECONDS * u64::from(UNLIMITED.burst - 1) };
    let rates = model::BroadcastRates { per_source: rate, per_service: rate, total: rate };
    let unspecified = OuterSources { ipv4: Ipv4Addr::UNSPECIFIED, ipv6: Ipv6Addr::UNSPECIFIED };
    let constants = model::LbSettings {
        broadcast_rates: [rates; model::REASON_COUNT],
        flow_set_count: options.flow_table_entries.div_ceil(intf::FLOW_SET_ENTRIES),
        connection_table: lb.connection_table_size(),
        counts_traffic: false,
        outer_header: outer(unspecified, 0),
        vlans: model::Vlans { is_tagging_enabled: lb.uses_vlans(), vip: options.vlan },
    };
    let keys = FleetKeys { keys: [NO_KEY; 2], current: KeyIndex::First };
    let mut model = model::LoadBalancer::new(constants, own_mac.0, keys);
    model.set_connection_key(lb.connection_key());
    model
}

fn outer(sources: OuterSources, mtu: u32) -> model::OuterHeader {
    model::OuterHeader { address: sources.ipv4, address_ipv6: sources.ipv6, mtu: mtu as usize }
}

fn slot(service: ServiceIndex) -> usize {
    service.get().into()
}

impl ComparedLb {
    /// Loads the program and its model, with unlimited broadcasts.
    pub fn load(options: Options, own_mac: MacAddress) -> Self {
        let broadcast_limits = [BroadcastRates::uniform(UNLIMITED); intf::LIMITED_KIND_COUNT as usize];
        let lb_stamping_clock = LbStampingClock::Ticks;
        let options = Options { broadcast_limits, lb_stamping_clock, ..options };
        let mut compared = Self::load_alone(options.clone(), own_mac);
        compared.model = Some(RefCell::new(model_of(&compared.lb, &options, own_mac)));
        compared
    }

    /// Loads the program without a model, with the broadcast rates of `options`.
    pub fn load_alone(options: Options, own_mac: MacAddress) -> Self {
        let vip_vlan = options.vlan;
        let mut lb = LoadBalancer::load(options).unwrap();
        lb.set_own_mac(own_mac);
        Self { lb, model: None, now_ns: Cell::new(1), vip_vlan }
    }

    fn change_model(&mut self, change: impl FnOnce(&mut model::LoadBalancer)) {
        if let Some(model) = &mut self.model {
            change(model.get_mut());
        }
    }

    /// Runs program and model on `frame`, and asserts that they agree. Returns verdict, packet and the model's outcome.
    pub fn run(&self, frame: &[u8]) -> (i32, Vec<u8>, Option<model::Outcome>) {
        let test_run::RunOutcome { verdict, packet, .. } = test_run::run(self.lb.program(), frame, 1).unwrap();
        let Some(model) = &self.model else { return (verdict, packet, None) };
        self.now_ns.set(self.now_ns.get() + 1);
        let mut expected = frame.to_vec();
        let outcome = model.borrow_mut().receive(&mut expected, self.now_ns.get());
        let name = intf::LB_COUNTER_NAMES[outcome.counter as usize];
        assert_eq!(verdict, outcome.verdict().xdp_action(), "the model's verdict, {name}, frame {frame:02x?}");
        assert_eq!(packet, expected, "the model's packet, {name}, frame {frame:02x?}");
        (verdict, packet, Some(outcome))
    }

    pub fn set_keys(&mut self, keys: &FleetKeys) {
        self.lb.set_keys(keys);
        self.change_model(|model| model.set_keys(*keys));
    }

    pub fn set_services(&mut self, services: &[(ServiceAddress, ServiceMode)]) -> anyhow::Result<Vec<ServiceIndex>> {
        let indexes = self.lb.set_services(services)?;
        let slots: Vec<usize> = indexes.iter().map(|index| slot(*index)).collect();
        self.change_model(|model| assert_eq!(model.set_services(services), slots, "the services' slots"));
        Ok(indexes)
    }

    pub fn set_time_key(&mut self, service: ServiceIndex, key: CookieKey) {
        self.lb.set_time_key(service, key);
        self.change_model(|model| model.set_time_key(slot(service), key));
    }

    pub fn set_server(&mut self, service: ServiceIndex, id: ServerId, server: Server) {
        self.lb.set_server(service, id, server);
        let server = model::Server { mac: server.mac.map(|mac| mac.0), eligible: server.is_eligible };
        self.change_model(|model| model.set_server(slot(service), id, Some(server)));
    }

    pub fn remove_server(&mut self, service: ServiceIndex, id: ServerId) {
        self.lb.remove_server(service, id);
        self.change_model(|model| model.set_server(slot(service), id, None));
    }

    pub fn set_masked(&mut self, service: ServiceIndex, id: ServerId, is_masked: bool) {
        self.lb.set_masked(service, id, is_masked);
        self.change_model(|model| model.set_masked(slot(service), id, is_masked));
    }

    pub fn install_table(&mut self, service: ServiceIndex, table: &PlacementTable) -> anyhow::Result<()> {
        self.lb.install_table(service, table)?;
        self.change_model(|model| model.install_table(slot(service), table.clone()));
        Ok(())
    }

    pub fn set_outer_header(&mut self, sources: OuterSources, mtu: u32) {
        self.lb.set_outer_header(sources, mtu);
        self.change_model(|model| model.set_outer_header(outer(sources, mtu)));
    }

    pub fn set_tunnel(&mut self, id: ServerId, tunnel: lb::Tunnel) -> anyhow::Result<()> {
        let lb::Tunnel { address, source_port } = tunnel;
        self.lb.set_tunnel(id, tunnel)?;
        self.change_model(|model| model.set_tunnel(id, model::Tunnel { address, source_port }));
        Ok(())
    }

    pub fn use_server_vlans(&mut self, vlans: BTreeSet<Vlan>) -> anyhow::Result<()> {
        self.lb.use_server_vlans(vlans)?;
        let vlans = model::Vlans { is_tagging_enabled: self.lb.uses_vlans(), vip: self.vip_vlan };
        self.change_model(|model| model.set_vlans(vlans));
        Ok(())
    }

    pub fn set_server_vlan(&mut self, id: ServerId, vlan: Vlan) {
        self.lb.set_server_vlan(id, vlan);
        self.change_model(|model| model.set_server_vlan(id, vlan));
    }

    pub fn set_broadcast_vlan(&mut self, service: ServiceIndex, vlan: Option<Vlan>) {
        self.lb.set_broadcast_vlan(service, vlan);
        self.change_model(|model| model.set_broadcast_vlan(slot(service), vlan));
    }

    pub fn set_owner_number(&mut self, owner: Option<OwnerNumber>) {
        self.lb.set_owner_number(owner);
        self.change_model(|model| model.set_owner(owner));
    }

    pub fn set_owner_mac(&mut self, owner: OwnerNumber, mac: Option<MacAddress>) {
        self.lb.set_owner_mac(owner, mac);
        let known = mac.map_or(model::Owner::Lost, |mac| model::Owner::Reachable(mac.0));
        self.change_model(|model| model.set_owner_at(owner, known));
    }

    pub fn forget_owner(&mut self, owner: OwnerNumber) {
        self.lb.forget_owner(owner);
        self.change_model(|model| model.set_owner_at(owner, model::Owner::Unknown));
    }

    pub fn tick(&mut self, monotonic: Duration) {
        self.lb.tick(monotonic);
        self.change_model(|model| model.set_clock(ClockTicks::at(monotonic)));
    }

    pub fn due_connections(&mut self, timers: &Timeouts, entries: u32) -> Vec<(Connection, ExpiryReason)> {
        self.change_model(model::LoadBalancer::record_sweep);
        self.lb.due_connections(timers, entries)
    }

    pub fn free_connections(&mut self, connections: &[Connection]) -> anyhow::Result<usize> {
        self.change_model(|model| model.free_connections(connections));
        self.lb.free_connections(connections)
    }

    pub fn guard_connection_table(&mut self) {
        let limit = entries_per_source(self.lb.connection_table_size(), self.lb.occupancy() as u32);
        self.lb.update_source_limit();
        self.change_model(|model| model.limit_entries((limit != 0).then_some(limit)));
    }

    pub fn count_connections(&mut self) {
        self.lb.count_connections();
    }

    pub fn count_traffic(&mut self, is_enabled: bool) -> anyhow::Result<()> {
        self.lb.count_traffic(is_enabled)?;
        self.change_model(|model| model.set_traffic_counting(is_enabled));
        Ok(())
    }

    /// Drops the model, for tests whose packets do not all pass through [`run`](Self::run).
    pub fn end_comparison(&mut self) {
        self.model = None;
    }

    /// Sets the MAC address, which ends the comparison with the model.
    pub fn set_own_mac(&mut self, mac: MacAddress) {
        self.end_comparison();
        self.lb.set_own_mac(mac);
    }

    /// Replaces the candidates of a table, which ends the comparison with the model.
    pub fn replace_candidates(
        &mut self,
        service: ServiceIndex,
        choose: impl FnOnce(&PlacementTable) -> PlacementTable,
    ) -> anyhow::Result<()> {
        self.end_comparison();
        self.lb.replace_candidates(service, choose)
    }
}
