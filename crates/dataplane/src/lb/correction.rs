//! `timestamps = "lb"`: which MAC address is which server's, and what the program has learnt of the servers' clocks
//! (`bpf/correction.bpf.h`).

use std::mem::offset_of;

use anyhow::{Context as _, ensure};
use coreward_intf as intf;
use coreward_model::consistency::Timestamps;
use coreward_model::cookie::{CookieKey, FleetKeys, KeyIndex};
use coreward_model::{ServerId, key_switch};
use libbpf_rs::{MapCore as _, MapFlags};
use nix::time::{ClockId, clock_gettime};
use zerocopy::{FromBytes as _, IntoBytes as _};

use super::{LoadBalancer, ServiceIndex, state_of};
use crate::mac::MacAddress;

/// What SYN-ACKs have told of a server's clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ServerClock {
    /// All its connections show one clock: it is stamped.
    Known,
    /// So many SYN-ACKs in a row have agreed, which is not enough yet; so many did not.
    NotKnown {
        /// In a row, the newest included.
        agreeing: u16,
        /// Since the server was made known here.
        disagreed: u64,
    },
}

/// A server that no cookie of a load balancer can name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("server id {0}: timestamps by the load balancer need ids from 0 to {max}", max = intf::CORRECTION_ID_MASK)]
pub struct IdTooLarge(ServerId);

impl LoadBalancer {
    /// The key that masks the time part of a service's cookies: the same at all load balancers, and never changed while
    /// the service has connections.
    pub fn set_time_key(&mut self, service: ServiceIndex, key: CookieKey) {
        let key = intf::cookie_key { k0: key.k0, k1: key.k1 };
        self.maps.state.write(state_of(service) + offset_of!(intf::service_state, time_key), &key);
    }

    /// From which of a server's TSvals on which key stamps, by this machine's clock.
    pub(super) fn switch_ms(&self, new: &FleetKeys) -> anyhow::Result<u32> {
        let now_ms = now_ms()?;
        let known = self.maps.state.read::<intf::fleet_keys>(offset_of!(intf::lb_state, keys));
        let key = |index: usize| CookieKey { k0: known.key[index].k0, k1: known.key[index].k1 };
        let current = if known.current == 0 { KeyIndex::First } else { KeyIndex::Second };
        let before = (FleetKeys { keys: [key(0), key(1)], current }, known.switch_ms);
        Ok(key_switch::switch_ms(&before, new, now_ms))
    }

    /// What is known of each server's clock, by id.
    ///
    /// # Errors
    /// When the map cannot be read.
    pub fn server_clocks(&self, service: ServiceIndex) -> anyhow::Result<Vec<(ServerId, ServerClock)>> {
        let map = self.maps.corrected_servers()?;
        let of_service = |key: &Vec<u8>| service_in(key) == Some(service);
        let keys: Vec<Vec<u8>> = map.keys().filter(of_service).collect();
        let mut clocks = Vec::new();
        for key in keys {
            let Some(value) = map.lookup(&key, MapFlags::ANY).context("reading a server's clock")? else { continue };
            let known = intf::corrected_server::read_from_bytes(&value).ok().context("a server's clock")?;
            let id = ServerId::try_from(u64::from(known.server_id))?;
            let clock = match u32::from(known.agreeing) >= intf::CORRECTION_AGREEING {
                true => ServerClock::Known,
                false => ServerClock::NotKnown { agreeing: known.agreeing, disagreed: known.disagreed },
            };
            clocks.push((id, clock));
        }
        clocks.sort_by_key(|(id, _)| *id);
        Ok(clocks)
    }

    fn is_corrected(&self, service: ServiceIndex) -> bool {
        self.service(service).mode.timestamps == Timestamps::LoadBalancer
    }

    /// A server's answers come from `mac` now and no longer from `before`. What is known of its clock goes along.
    pub(super) fn move_corrected_server(
        &mut self,
        service: ServiceIndex,
        id: ServerId,
        before: Option<MacAddress>,
        mac: Option<MacAddress>,
    ) -> anyhow::Result<()> {
        if !self.is_corrected(service) || before == mac && mac.is_none() {
            return Ok(());
        }
        ensure!(u32::from(id.get()) <= intf::CORRECTION_ID_MASK, IdTooLarge(id));
        let map = self.maps.corrected_servers()?;
        let lookup = |mac: MacAddress| -> anyhow::Result<Option<intf::corrected_server>> {
            let value = map.lookup(&key_of(service, mac), MapFlags::ANY).context("reading a server's clock")?;
            Ok(value.and_then(|value| intf::corrected_server::read_from_bytes(&value).ok()))
        };
        let of_id = |known: &intf::corrected_server| known.server_id == id.get();
        let known = before.map(lookup).transpose()?.flatten().filter(of_id);
        if let Some(before) = before.filter(|before| Some(*before) != mac && known.is_some()) {
            map.delete(&key_of(service, before)).context("forgetting a server's old address")?;
        }
        let Some(mac) = mac else { return Ok(()) };
        if lookup(mac)?.is_some_and(|there| there.server_id == id.get()) {
            return Ok(());
        }
        let value = known.unwrap_or(intf::corrected_server { server_id: id.get(), ..Default::default() });
        map.update(&key_of(service, mac), value.as_bytes(), MapFlags::ANY).context("a server's address")
    }
}

fn key_of(service: ServiceIndex, mac: MacAddress) -> [u8; 8] {
    (mac.word() | u64::from(service.0) << intf::CORRECTED_SERVICE_SHIFT).to_ne_bytes()
}

fn service_in(key: &[u8]) -> Option<ServiceIndex> {
    let word = u64::from_ne_bytes(key.try_into().ok()?);
    u8::try_from(word >> intf::CORRECTED_SERVICE_SHIFT).ok().map(ServiceIndex)
}

/// The clock that the program reads (CLOCK_MONOTONIC), modulo 2^32 ms.
fn now_ms() -> anyhow::Result<u32> {
    Ok(std::time::Duration::from(clock_gettime(ClockId::CLOCK_MONOTONIC)?).as_millis() as u32)
}
