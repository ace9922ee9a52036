//! Management of LB-side stamping (`timestamps = "lb"`), for which the program learns servers' MAC addresses and clocks
//! (`bpf/lb/lb_cookie.h`).

use std::collections::{BTreeMap, BTreeSet};
use std::mem::offset_of;

use anyhow::{Context as _, ensure};
use coreward_intf as intf;
use coreward_model::consistency::CookieStamper;
use coreward_model::cookie::{CookieKey, CookieKeyIndex, FleetCookieKeys};
use coreward_model::lb_stamping::{MIN_AGREEING_SYN_ACKS, STAMPABLE_SERVER_ID_COUNT, can_carry_server_id};
use coreward_model::{ServerId, key_activation};
use libbpf_rs::{MapCore as _, MapFlags, MapHandle};
use zerocopy::{FromBytes as _, IntoBytes as _};

use super::program::LoadBalancerMaps;
use super::{LbStampingClock, LoadBalancer, ServiceIndex, service_state_offset};
use crate::clock::monotonic_ms;
use crate::mac::MacAddress;

/// Measurements of the clock in a server's TCP timestamps, taken from the server's replies.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ServerClockMeasurements {
    /// Number of the most recent consecutive connections whose SYN-ACKs agreed on one clock, at most
    /// [`MIN_AGREEING_SYN_ACKS`].
    pub agreeing_connection_count: u16,
    /// Number of sampled connections whose TSval grew by 1 per ms. A sample with another rate halves this number.
    pub steady_sample_count: u16,
    /// Whether the newest sample's TSval grew at a rate other than 1 per ms.
    pub is_newest_sample_unsteady: bool,
    /// Number of new connections sent to the server.
    pub opened_connection_count: u64,
    /// Number of SYN-ACKs from the server that passed this load balancer.
    pub syn_ack_count: u64,
    /// Number of the server's SYN-ACKs that had TCP timestamps.
    pub timestamped_syn_ack_count: u64,
    /// Number of SYN-ACKs whose clock differed from the clock of the previous connection.
    pub disagreeing_syn_ack_count: u64,
}

/// State of a server's timestamp clock, which decides whether the load balancer stamps the server's new connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ServerClockState {
    /// All connections of the server share one clock. The connections are stamped.
    SharedClock,
    /// Each connection of the server has its own clock, which grows by 1 per ms. The connections are stamped.
    PerConnectionClock,
    /// Stamping is still undecided, because more connections are needed to learn the server's clock.
    Learning,
    /// None of the server's replies has passed this load balancer. The server's connections are not stamped.
    NoReplies,
    /// The server's replies have no TCP timestamps. The server's connections are not stamped.
    NoTimestamps,
    /// Each connection has its own clock, whose rate is unmeasured or is not 1 per ms. The connections are not stamped.
    Unusable,
}

impl ServerClockState {
    /// Returns the state's name, as the controller prints it.
    pub fn name(self) -> &'static str {
        match self {
            ServerClockState::SharedClock => "known",
            ServerClockState::PerConnectionClock => "per-connection",
            ServerClockState::Learning => "learning",
            ServerClockState::NoReplies => "unseen",
            ServerClockState::NoTimestamps => "no-timestamps",
            ServerClockState::Unusable => "differs",
        }
    }
}

/// Number of disagreeing SYN-ACKs after which a clock of unmeasured rate counts as [`ServerClockState::Unusable`].
const MAX_DISAGREEING_UNMEASURED_SYN_ACKS: u64 = 100;

impl ServerClockMeasurements {
    /// Returns the clock's state according to the measurements.
    pub fn state(&self) -> ServerClockState {
        if self.agreeing_connection_count >= MIN_AGREEING_SYN_ACKS {
            ServerClockState::SharedClock
        } else if self.steady_sample_count >= MIN_AGREEING_SYN_ACKS {
            ServerClockState::PerConnectionClock
        } else if self.syn_ack_count == 0 {
            ServerClockState::NoReplies
        } else if self.is_newest_sample_unsteady
            || (self.steady_sample_count == 0 && self.disagreeing_syn_ack_count >= MAX_DISAGREEING_UNMEASURED_SYN_ACKS)
        {
            ServerClockState::Unusable
        } else if self.timestamped_syn_ack_count == 0 && self.syn_ack_count >= u64::from(MIN_AGREEING_SYN_ACKS) {
            ServerClockState::NoTimestamps
        } else {
            ServerClockState::Learning
        }
    }

    /// Returns the reason why the server's new connections are not stamped, and the remedy. Returns `None` if they are
    /// stamped, or the clock is still being learned.
    pub fn stamping_problem(&self) -> Option<String> {
        const FLOW_TABLE_FALLBACK_NOTE: &str = "its connections use the flow table";
        match self.state() {
            ServerClockState::SharedClock | ServerClockState::PerConnectionClock | ServerClockState::Learning => None,
            ServerClockState::NoReplies => {
                (self.opened_connection_count >= u64::from(MIN_AGREEING_SYN_ACKS)).then(|| {
                    format!(
                        "{} new connections went to it, but none of its replies passes here: expected its route to the \
                     clients to lead through this load balancer",
                        self.opened_connection_count
                    )
                })
            }
            ServerClockState::NoTimestamps => Some(format!(
                "none of its {} SYN-ACKs has TCP timestamps, so {FLOW_TABLE_FALLBACK_NOTE}: expected \
                 net.ipv4.tcp_timestamps = 1 or 2 there",
                self.syn_ack_count
            )),
            ServerClockState::Unusable if self.is_newest_sample_unsteady => Some(format!(
                "the TSval of its answers does not grow by 1 per ms, so {FLOW_TABLE_FALLBACK_NOTE}: expected a clock \
                 of 1 ms (Linux has it, without `features tcp_usec_ts` in its routes)"
            )),
            ServerClockState::Unusable => Some(format!(
                "{} of its {} SYN-ACKs have another clock than the one before, and no connection sent answers {} ms \
                 apart, which would show the clock, so {FLOW_TABLE_FALLBACK_NOTE}: expected longer connections, or \
                 net.ipv4.tcp_timestamps = 2 there",
                self.disagreeing_syn_ack_count,
                self.timestamped_syn_ack_count,
                intf::LB_STAMPING_SAMPLE_MS
            )),
        }
    }
}

/// Numbers of packets on established connections to a service with LB-side stamping, by the method that found the
/// packets' server.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StampedPacketCounts {
    /// Number of packets whose server was found by their cookie.
    pub found_by_cookie: u64,
    /// Number of packets whose server was found in the flow table.
    pub found_in_flow_table: u64,
}

/// Error for a server id that is too large for LB-side stamping.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("server id {0}: timestamps by the load balancer need ids from 0 to {max}", max = STAMPABLE_SERVER_ID_COUNT - 1)]
pub struct ServerIdTooLarge(ServerId);

impl LoadBalancer {
    /// Sets the key that masks the time part of a service's cookies. All load balancers need the same key. It must not
    /// change while the service has connections.
    pub fn set_time_key(&mut self, service: ServiceIndex, key: CookieKey) {
        let bpf_key = key.to_bpf_key();
        self.maps.state.write(service_state_offset(service) + offset_of!(intf::service_state, time_key), &bpf_key);
    }

    /// Returns the time from which the current key of `new_keys` applies, in ms of this machine's clock, modulo 2^32.
    pub(super) fn key_switch_time_ms(&self, new_keys: &FleetCookieKeys) -> u32 {
        let now_ms = match self.variant.lb_stamping_clock {
            LbStampingClock::Kernel => monotonic_ms(),
            LbStampingClock::DaemonTicks => self.packet_clock_ticks().0.wrapping_mul(100),
        };
        let stored_keys = self.maps.state.read::<intf::fleet_keys>(offset_of!(intf::lb_state, keys));
        let read_stored_key = |index: usize| CookieKey { k0: stored_keys.key[index].k0, k1: stored_keys.key[index].k1 };
        let current_index = if stored_keys.current == 0 { CookieKeyIndex::First } else { CookieKeyIndex::Second };
        let previous_keys = (
            FleetCookieKeys { keys: [read_stored_key(0), read_stored_key(1)], current_key_index: current_index },
            stored_keys.switch_ms,
        );
        key_activation::key_activation_time_ms(&previous_keys, new_keys, now_ms)
    }

    /// Returns the measured timestamp clock of each server of a service, sorted by server id. If two ids share a MAC
    /// address because the operator changed the id, returns only the id that takes new connections. Fails when the map
    /// cannot be read.
    pub fn server_clock_measurements(
        &self,
        service: ServiceIndex,
    ) -> anyhow::Result<Vec<(ServerId, ServerClockMeasurements)>> {
        let service_clocks = read_lb_stamped_servers(&self.maps)?
            .into_iter()
            .filter(|((entry_service, _), _)| *entry_service == service);
        let parse_server_clock = |(_, stored_clock): (_, intf::lb_stamped_server)| -> anyhow::Result<_> {
            let id = ServerId::try_from(u64::from(stored_clock.server_id))?;
            let clock = ServerClockMeasurements {
                agreeing_connection_count: stored_clock.agreeing,
                steady_sample_count: stored_clock.steady,
                is_newest_sample_unsteady: stored_clock.unsteady != 0,
                opened_connection_count: self.server_traffic(id).opened_connection_count,
                syn_ack_count: stored_clock.syn_acks,
                timestamped_syn_ack_count: stored_clock.with_timestamps,
                disagreeing_syn_ack_count: stored_clock.disagreed,
            };
            Ok((id, clock))
        };
        let mut clocks = service_clocks.map(parse_server_clock).collect::<anyhow::Result<Vec<_>>>()?;
        clocks.sort_by_key(|(id, _)| *id);
        Ok(clocks)
    }

    /// Returns the numbers of a service's packets on established connections, by the method that found their server.
    pub fn stamped_packet_counts(&self, service: ServiceIndex) -> StampedPacketCounts {
        let packets_by_outcome = self.service_counters(service).packets_by_outcome;
        StampedPacketCounts {
            found_by_cookie: packets_by_outcome[intf::LB_COUNTER_ESTABLISHED as usize],
            found_in_flow_table: packets_by_outcome[intf::LB_COUNTER_FLOW_TABLE as usize],
        }
    }

    fn is_lb_stamped(&self, service: ServiceIndex) -> bool {
        self.service(service).settings.timestamps == CookieStamper::LoadBalancer
    }

    /// Moves a server's clock to the map entry of the MAC address `mac`. Does nothing if `mac` is `None` (unknown).
    pub(super) fn move_server_clock_to_mac(
        &mut self,
        service: ServiceIndex,
        id: ServerId,
        mac: Option<MacAddress>,
        is_eligible: bool,
    ) -> anyhow::Result<()> {
        let Some(mac) = mac.filter(|_| self.is_lb_stamped(service)) else { return Ok(()) };
        if !can_carry_server_id(id) {
            // A service may have such ids from the time before it used LB-side stamping.
            ensure!(!is_eligible, ServerIdTooLarge(id));
            return Ok(());
        }
        let previous_mac = self.lb_stamped_macs.insert((service, id), mac).filter(|former_mac| *former_mac != mac);
        let clock_map = self.maps.lb_stamped_server_map();
        let clock_at_previous_mac = match previous_mac {
            Some(former_mac) => read_lb_stamped_server(clock_map, service, former_mac)?
                .filter(|stored_clock| stored_clock.server_id == id.get()),
            None => None,
        };
        if let (Some(former_mac), Some(_)) = (previous_mac, clock_at_previous_mac) {
            self.remove_or_reassign_clock(clock_map, service, former_mac)?;
        }
        let stored_clock = match read_lb_stamped_server(clock_map, service, mac)? {
            Some(entry_at_mac) if entry_at_mac.server_id == id.get() => return Ok(()),
            // If two servers have this address, the one that takes new connections is stamped.
            Some(entry_at_mac) if !is_eligible && self.is_last_known_mac(service, entry_at_mac.server_id, mac) => {
                return Ok(());
            }
            Some(entry_at_mac) => entry_at_mac,
            None => clock_at_previous_mac.unwrap_or_default(),
        };
        write_lb_stamped_server(
            clock_map,
            service,
            mac,
            &intf::lb_stamped_server { server_id: id.get(), ..stored_clock },
        )
    }

    /// Removes a server's clock from the map. If another server id has the same MAC address, that id gets the clock.
    pub(super) fn remove_lb_stamped_server(&mut self, service: ServiceIndex, id: ServerId) -> anyhow::Result<()> {
        let Some(mac) = self.lb_stamped_macs.remove(&(service, id)) else { return Ok(()) };
        let clock_map = self.maps.lb_stamped_server_map();
        match read_lb_stamped_server(clock_map, service, mac)? {
            Some(stored_clock) if stored_clock.server_id == id.get() => {
                self.remove_or_reassign_clock(clock_map, service, mac)
            }
            _ => Ok(()),
        }
    }

    pub(super) fn remove_lb_stamped_servers(&mut self, services: &BTreeSet<ServiceIndex>) -> anyhow::Result<()> {
        self.lb_stamped_macs.retain(|(entry_service, _), _| !services.contains(entry_service));
        let clock_map = self.maps.lb_stamped_server_map();
        for ((entry_service, mac), _) in read_lb_stamped_servers(&self.maps)? {
            if services.contains(&entry_service) {
                clock_map.delete(&stamped_server_key(entry_service, mac)).context("forgetting a server's address")?;
            }
        }
        Ok(())
    }

    /// Removes the clock of a MAC address from the map, or assigns it to another server id that has the same address.
    fn remove_or_reassign_clock(&self, map: &MapHandle, service: ServiceIndex, mac: MacAddress) -> anyhow::Result<()> {
        let other_server_at_mac = self
            .lb_stamped_macs
            .iter()
            .find(|((entry_service, _), server_mac)| *entry_service == service && **server_mac == mac);
        match (other_server_at_mac, read_lb_stamped_server(map, service, mac)?) {
            (Some(((_, other_id), _)), Some(stored_clock)) => write_lb_stamped_server(
                map,
                service,
                mac,
                &intf::lb_stamped_server { server_id: other_id.get(), ..stored_clock },
            ),
            _ => map.delete(&stamped_server_key(service, mac)).context("forgetting a server's old address"),
        }
    }

    fn is_last_known_mac(&self, service: ServiceIndex, id: u16, mac: MacAddress) -> bool {
        ServerId::try_from(u64::from(id)).is_ok_and(|id| self.lb_stamped_macs.get(&(service, id)) == Some(&mac))
    }
}

/// Returns the source MAC address of each server's replies, from maps that were taken over.
pub(super) fn read_lb_stamped_macs(
    maps: &LoadBalancerMaps,
) -> anyhow::Result<BTreeMap<(ServiceIndex, ServerId), MacAddress>> {
    let stored_clocks = read_lb_stamped_servers(maps)?.into_iter();
    stored_clocks
        .map(|((service, mac), stored_clock)| Ok(((service, u64::from(stored_clock.server_id).try_into()?), mac)))
        .collect()
}

type StampedServerClock = ((ServiceIndex, MacAddress), intf::lb_stamped_server);

fn read_lb_stamped_servers(maps: &LoadBalancerMaps) -> anyhow::Result<Vec<StampedServerClock>> {
    let clock_map = maps.lb_stamped_server_map();
    let read_stamped_server = |key: Vec<u8>| -> anyhow::Result<Option<StampedServerClock>> {
        let key_word = u64::from_ne_bytes(key.as_slice().try_into().context("a server's key")?);
        let service_index = ServiceIndex((key_word >> intf::LB_STAMPED_SERVICE_SHIFT) as u16);
        let mac = MacAddress::from_word(key_word);
        Ok(read_lb_stamped_server(clock_map, service_index, mac)?
            .map(|stored_clock| ((service_index, mac), stored_clock)))
    };
    clock_map.keys().map(read_stamped_server).filter_map(Result::transpose).collect()
}

fn read_lb_stamped_server(
    map: &MapHandle,
    service: ServiceIndex,
    mac: MacAddress,
) -> anyhow::Result<Option<intf::lb_stamped_server>> {
    let entry_bytes =
        map.lookup(&stamped_server_key(service, mac), MapFlags::ANY).context("reading a server's clock")?;
    entry_bytes
        .map(|value| intf::lb_stamped_server::read_from_bytes(&value).ok().context("a server's clock of another size"))
        .transpose()
}

fn write_lb_stamped_server(
    map: &MapHandle,
    service: ServiceIndex,
    mac: MacAddress,
    stored_clock: &intf::lb_stamped_server,
) -> anyhow::Result<()> {
    map.update(&stamped_server_key(service, mac), stored_clock.as_bytes(), MapFlags::ANY).context("a server's address")
}

fn stamped_server_key(service: ServiceIndex, mac: MacAddress) -> [u8; 8] {
    (mac.to_word() | u64::from(service.0) << intf::LB_STAMPED_SERVICE_SHIFT).to_ne_bytes()
}
