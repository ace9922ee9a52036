//! Tests that forged TSecr values reach a server at most as often as its share of the ids.
//!
//! A permutation, selected by the keyed hash of the 4-tuple, hides the 15 bits of a cookie (kind and id). Therefore:
//!
//! * A random TSecr maps to each of the 2^15 values with the same probability: to each known server with 2^-15, and to
//!   no unknown server.
//! * A cookie used on another connection (another 4-tuple) maps like a random TSecr.
//! * A valid cookie with a flip in its low 16 bits maps like a random TSecr. (A flip of the key bit selects the other
//!   key.) A flip in the upper 16 bits (the time) has no effect.
//!
//! Not claimed: a client that tries all 2^14 values on one connection reaches every server with one packet, as with any
//! 14 bits.

use std::collections::{BTreeMap, BTreeSet};
use std::net::Ipv4Addr;

use anyhow::ensure;
use coreward_intf as intf;
use coreward_model::consistency::ServiceMode;
use coreward_model::cookie::{self, Cookie, CookieKey, FleetKeys, KeyIndex};
use coreward_model::lb::{Server, TokenBucketSelector};
use coreward_model::tuple::Protocol;
use coreward_model::{FourTuple, ServerId, ServiceAddress};

use crate::change::Change;
use crate::frame::{self, EthernetIpHeader, TcpHeader, timestamp_option};
use crate::fuzz_rng::FuzzRng;
use crate::harness::{Harness, HarnessSetup, OWN_MAC, TIME_KEY};

const VIP: (Ipv4Addr, u16) = (Ipv4Addr::new(10, 200, 0, 1), 80);
const ACK: u8 = 0x10;

/// Number of packets that reached each server, among those with a number of TSecr values.
#[derive(Debug, Clone)]
pub struct TsecrCoverage {
    pub tried_count: u64,
    pub packets_by_server: BTreeMap<ServerId, u64>,
}

impl TsecrCoverage {
    /// Returns how many standard deviations Pearson's chi-square over "server 1, server 2, ..., none" is above its
    /// mean, if each server gets a TSecr with probability 2^-15. (With thousands of servers chi-square is nearly
    /// normal.)
    pub fn z_score(&self) -> f64 {
        let servers = self.packets_by_server.len() as f64;
        let each = self.tried_count as f64 / f64::from(intf::COOKIE_HIDDEN_MASK + 1);
        let hits: u64 = self.packets_by_server.values().sum();
        let none = (self.tried_count as f64 - each * servers, (self.tried_count - hits) as f64);
        let cells = self.packets_by_server.values().map(|count| (each, *count as f64)).chain([none]);
        let chi_square: f64 = cells.map(|(expected, found)| (found - expected).powi(2) / expected).sum();
        (chi_square - servers) / (2.0 * servers).sqrt()
    }
}

/// Numbers of packets that reached a server although one bit of their valid cookie was flipped.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct BitFlipCounts {
    /// Number of valid cookies whose bits were flipped.
    pub cookies: u64,
    /// Number of packets that reached another server, by flipped bit of TSecr.
    pub other_server_counts: [u64; 32],
    /// Number of packets that reached the server of the cookie, by flipped bit of TSecr.
    pub same_server_counts: [u64; 32],
}

/// Load balancer with one service, to which packets with forged cookies are sent.
pub struct CookieTester {
    harness: Harness,
    keys: FleetKeys,
    servers: Vec<ServerId>,
    known: BTreeSet<ServerId>,
    service_slot: usize,
    rng: FuzzRng,
    packet: Vec<u8>,
}

impl CookieTester {
    /// Creates a service with `servers` servers of random ids (at most 16,384). `with_program` also loads the BPF
    /// program, which fails without the necessary capabilities.
    pub fn new(seed: u64, servers: usize, with_program: bool) -> anyhow::Result<Self> {
        let mut rng = FuzzRng::new(seed, 1);
        let mut key = || CookieKey { k0: rng.u64(), k1: rng.u64() };
        let keys = FleetKeys { keys: [key(), key()], current: KeyIndex::First };
        let mut harness = Harness::new(HarnessSetup::new(OWN_MAC, keys), with_program)?;
        let address = ServiceAddress { socket: VIP.into(), protocol: Protocol::Tcp };
        let service_slot = harness.change(&Change::Services(vec![(address, ServiceMode::default())]))?[0];
        let mut known = BTreeSet::new();
        while known.len() < servers {
            let id = ServerId::try_from(rng.below(ServerId::COUNT) as u64)?;
            if known.insert(id) {
                let [high, low] = id.get().to_be_bytes();
                let server = Server { mac: Some([2, 0, 0, 0, high, low]), eligible: true };
                harness.change(&Change::Server(service_slot, id, Some(server)))?;
            }
        }
        let servers = known.iter().copied().collect();
        Ok(Self { harness, keys, servers, known, service_slot, rng, packet: Vec::new() })
    }

    fn client(&mut self) -> (Ipv4Addr, u16) {
        (Ipv4Addr::from(self.rng.u32()), self.rng.u16())
    }

    /// Returns a random server, and a valid cookie of it under one of the two keys.
    fn draw_valid_cookie(&mut self, client: (Ipv4Addr, u16)) -> (ServerId, u32) {
        let server = self.rng.pick(&self.servers);
        let current = self.rng.pick(&[KeyIndex::First, KeyIndex::Second]);
        let keys = FleetKeys { current, ..self.keys };
        let tsecr = cookie::stamp_tsval(
            &keys,
            &TIME_KEY,
            &FourTuple::ipv4(client, VIP),
            Cookie::Server(server),
            self.rng.u32(),
        );
        (server, tsecr)
    }

    /// Sends a packet with this TSecr and returns the server that it reaches; `None` when it is broadcast.
    fn send_and_find_server(&mut self, client: (Ipv4Addr, u16), tsecr: u32) -> anyhow::Result<Option<ServerId>> {
        let buckets = TokenBucketSelector::Service(self.service_slot, intf::LIMITED_UNKNOWN_COOKIE);
        self.harness.change(&Change::BroadcastTokens(buckets, true))?;
        let ip = EthernetIpHeader {
            mac: OWN_MAC,
            source: client.0,
            destination: VIP.0,
            protocol: frame::TCP,
            identification: 0,
            fragment: 0x4000,
            option_words: 0,
            tos_and_ttl: [0, 64],
        };
        let options = [&[1, 1][..], &timestamp_option(1, tsecr)].concat();
        let segment = TcpHeader { ports: (client.1, VIP.1), flags: ACK, options };
        self.packet.clear();
        ip.append_frame(&mut self.packet, |packet| segment.append_segment(packet, (1, 1), 0));
        let (outcome, difference) = self.harness.process_packet(&self.packet)?;
        if let Some(difference) = difference {
            anyhow::bail!("BPF program and reference model differ in {difference}");
        }
        let to = &self.harness.frame_after()[..6];
        match outcome.server {
            Some(id) => {
                ensure!(self.known.contains(&id), "a TSecr reached {id}, which is not known");
                ensure!(to == [&[2, 0, 0, 0][..], &id.get().to_be_bytes()].concat(), "sent to {to:x?}, not to {id}");
            }
            None => ensure!(outcome.counter == intf::LB_COUNTER_BROADCAST && to == [0xff; 6], "{outcome:?}"),
        }
        Ok(outcome.server)
    }

    fn measure_coverage(
        &mut self,
        tsecr_values: u64,
        mut tsecr: impl FnMut(&mut Self) -> ((Ipv4Addr, u16), u32),
    ) -> anyhow::Result<TsecrCoverage> {
        let mut packets_by_server: BTreeMap<ServerId, u64> = self.servers.iter().map(|id| (*id, 0)).collect();
        for _ in 0..tsecr_values {
            let (client, tsecr) = tsecr(self);
            if let Some(id) = self.send_and_find_server(client, tsecr)? {
                *packets_by_server.get_mut(&id).expect("a known server") += 1;
            }
        }
        Ok(TsecrCoverage { tried_count: tsecr_values, packets_by_server })
    }

    /// Sends random TSecr values from random clients. Fails when a packet reaches an unknown server, or when program
    /// and reference model differ.
    pub fn send_random_tsecrs(&mut self, tsecr_values: u64) -> anyhow::Result<TsecrCoverage> {
        self.measure_coverage(tsecr_values, |cookies| (cookies.client(), cookies.rng.u32()))
    }

    /// Sends valid cookies of one connection in packets of another connection.
    pub fn replay_cookies(&mut self, tsecr_values: u64) -> anyhow::Result<TsecrCoverage> {
        self.measure_coverage(tsecr_values, |cookies| {
            let (client, other) = (cookies.client(), cookies.client());
            (other, cookies.draw_valid_cookie(client).1)
        })
    }

    /// Flips each single bit of `cookies` valid cookies. Fails as [`send_random_tsecrs`](Self::send_random_tsecrs)
    /// does, or when an unchanged cookie does not reach its server.
    pub fn flip_cookie_bits(&mut self, cookies: u64) -> anyhow::Result<BitFlipCounts> {
        let mut flips = BitFlipCounts { cookies, ..BitFlipCounts::default() };
        for _ in 0..cookies {
            let client = self.client();
            let (server, tsecr) = self.draw_valid_cookie(client);
            ensure!(
                self.send_and_find_server(client, tsecr)? == Some(server),
                "a valid cookie of {server} went astray"
            );
            for bit in 0..32 {
                match self.send_and_find_server(client, tsecr ^ 1 << bit)? {
                    Some(id) if id == server => flips.same_server_counts[bit] += 1,
                    Some(_) => flips.other_server_counts[bit] += 1,
                    None => {}
                }
            }
        }
        Ok(flips)
    }
}
