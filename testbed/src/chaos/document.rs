//! Documents of the fleet, one after the other, each another change; and some that must be refused.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::net::SocketAddrV4;

use coreward_model::rss::{seeded_rng, uniform_below};
use rand_xoshiro::Xoshiro256PlusPlus;

use crate::topology::server_address;

/// [`seeded_rng`]'s stream for what changes.
const PURPOSE_CHANGES: u64 = 0x6368_6102;
/// Of so many servers at least are active, whatever else changes.
const ACTIVE_MIN: usize = 2;
const POLICIES: [&str; 6] = ["crossrss", "crossrss-plus", "rr", "hash", "least", "pow2"];

/// What a document says of a server that is in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Entry {
    draining: bool,
    weight: u32,
}

/// What the newest document says, and what the next will.
#[derive(Debug, Clone)]
pub struct Documents {
    rng: Xoshiro256PlusPlus,
    services: Vec<(String, SocketAddrV4, &'static str)>,
    policies: Vec<&'static str>,
    servers: BTreeMap<u16, Option<Entry>>,
    report_interval_ms: u32,
    number: u64,
}

impl Documents {
    /// With all `servers` active. `services`: name, address, and further lines as they are to stand there.
    pub fn new(seed: u64, servers: &[u16], services: Vec<(String, SocketAddrV4, &'static str)>) -> Self {
        let active = Entry { draining: false, weight: 1 };
        Self {
            rng: seeded_rng(seed, PURPOSE_CHANGES),
            policies: vec![POLICIES[0]; services.len()],
            services,
            servers: servers.iter().map(|number| (*number, Some(active))).collect(),
            report_interval_ms: 100,
            number: 0,
        }
    }

    /// The document as it stands; its number makes it another text each time.
    pub fn text(&self) -> String {
        let mut text = format!("# {}\nreport_interval = \"{}ms\"\n", self.number, self.report_interval_ms);
        for (number, entry) in &self.servers {
            let Some(Entry { draining, weight }) = entry else { continue };
            let (address, state) = (server_address(*number), if *draining { "draining" } else { "active" });
            let _ = writeln!(
                text,
                "\n[[server]]\nname = \"s{number}\"\naddress = \"{address}\"\nstate = \"{state}\"\nweight = {weight}"
            );
        }
        for ((name, address, more), policy) in self.services.iter().zip(&self.policies) {
            let _ =
                write!(text, "\n[[service]]\nname = \"{name}\"\nvip = \"{address}\"\npolicy = \"{policy}\"\n{more}");
        }
        text
    }

    /// One change further.
    pub fn change(&mut self) {
        self.number += 1;
        match self.below(8) {
            0 => {
                let service = self.below(self.policies.len() as u32) as usize;
                self.policies[service] = POLICIES[self.below(POLICIES.len() as u32) as usize];
            }
            1 => self.report_interval_ms = [50, 100, 200][self.below(3) as usize],
            // A comment is a change of the document, too.
            2 => {}
            _ => self.change_server(),
        }
    }

    fn change_server(&mut self) {
        let numbers: Vec<u16> = self.servers.keys().copied().collect();
        let number = numbers[self.below(numbers.len() as u32) as usize];
        let others = self
            .servers
            .iter()
            .filter(|(other, entry)| **other != number && entry.is_some_and(|entry| !entry.draining));
        let may_go = others.count() >= ACTIVE_MIN;
        let entry = match self.below(4) {
            0 if may_go => None,
            1 if may_go => Some(Entry { draining: true, weight: 1 }),
            2 => Some(Entry { draining: false, weight: 1 + self.below(4) }),
            _ => Some(Entry { draining: false, weight: 1 }),
        };
        self.servers.insert(number, entry);
    }

    /// The document with a mistake in it.
    pub fn wrong(&mut self) -> String {
        let text = self.text();
        match self.below(5) {
            0 => format!("{text}no_such_key = 1\n"),
            1 => text.replacen("[[service]]", "[[service]", 1),
            2 => text.replacen("policy = \"", "policy = \"no-such-", 1),
            // A second server of the same name.
            3 => format!("{text}\n[[server]]\nname = \"s1\"\naddress = \"10.1.9.9\"\n\n[[server]]\nname = \"s1\"\n"),
            _ => text.replacen("10.200.0.1", "10.200.0.300", 1),
        }
    }

    /// All servers active, as at the beginning.
    pub fn restore(&mut self) {
        self.number += 1;
        self.servers.values_mut().for_each(|entry| *entry = Some(Entry { draining: false, weight: 1 }));
    }

    fn below(&mut self, bound: u32) -> u32 {
        uniform_below(&mut self.rng, bound)
    }
}
