//! The real agent in a guest: `coreward agent rss`, and the daemon with a controller.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use coreward_model::rss::{IndirectionTable, RssConfig, RssKey};
use coreward_model::{FourTuple, ServerId};
use serde::Deserialize;
use serde_json::Value;

use crate::guest::Guest;
use crate::wire::{FLOW_COUNT, VIP, VIP_IPV6};

/// Maximum time until a daemon is ready. Under emulation, the BPF verifier alone takes seconds.
pub const START_TIMEOUT: Duration = Duration::from_secs(60);
/// Maximum time until a daemon detects a change, for which it polls once a second.
const DETECTION_TIMEOUT: Duration = Duration::from_secs(15);

/// Id of the server in the fleet document, which is the seed of its balanced indirection table.
const SERVER_ID: u64 = 4711;
/// RSS key of the fleet, which is in the controller's secret file.
const RSS_KEY: &str = "c0:4e:3a:dd:00:11:22:33:44:55:66:77:88:99:aa:bb:cc:dd:ee:ff:\
                         10:32:54:76:98:ba:dc:fe:0f:1e:2d:3c:4b:5a:69:78:87:96:a5:b4";

/// Returns the configuration files of the guest, as name (without leading slash) and content.
pub fn files() -> [(&'static str, String); 5] {
    let controller = "listen = \"127.0.0.1:7400\"\nstore = \"/run/controller.redb\"\nfleet = \"fleet.toml\"\n\
                      rss_key_file = \"rss.key\"\n";
    let fleet = format!(
        "[[server]]\nname = \"s1\"\naddress = \"10.2.0.11\"\nid = {SERVER_ID}\n\n\
         [[service]]\nname = \"web\"\nvip = \"{VIP}\"\n\n\
         [[service]]\nname = \"web-ipv6\"\nvip = \"{VIP_IPV6}\"\n"
    );
    let agent = "server = \"s1\"\ncontroller = \"127.0.0.1:7400\"\ninterface = \"eth0\"\n\
                 pin_directory = \"/sys/fs/bpf/coreward\"\nmanage_rss = true\nsteer = \"off\"\n";
    let balancer = "name = \"lb1\"\ncontroller = \"127.0.0.1:7400\"\ninterface = \"eth0\"\n\
                    pin_directory = \"/sys/fs/bpf/coreward-lb\"\nxdp_mode = \"generic\"\n";
    [
        ("etc/lb.toml", balancer.to_owned()),
        ("etc/controller.toml", controller.to_owned()),
        ("etc/fleet.toml", fleet),
        ("etc/rss.key", RSS_KEY.to_owned()),
        ("etc/agent.toml", agent.to_owned()),
    ]
}

/// Returns the RSS settings that an agent with `manage_rss` makes in a NIC that has the settings `before`. A driver
/// that does not show its key does not accept one either.
pub fn expected_managed_rss(before: &RssConfig, accepts_key: bool, receive_queues: u16) -> Result<RssConfig> {
    let key = if accepts_key { RSS_KEY.parse()? } else { before.key.clone() };
    let seed = ServerId::try_from(SERVER_ID)?.get().into();
    let entries = before.indirection_table.entry_count();
    Ok(RssConfig { key, indirection_table: IndirectionTable::balanced(seed, entries, receive_queues)? })
}

/// Line of the output of `coreward agent rss --json`.
#[derive(Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
enum RssWatchLine {
    Nic { key: String, indirection_table: Vec<u32> },
    Syn { source: SocketAddr, destination: SocketAddr, predicted_queue: u16, actual_queue: u16 },
    End { verdict: String },
}

/// Parsed output of `coreward agent rss`.
pub struct RssWatchOutput {
    /// RSS key and indirection table that the agent read from the NIC.
    pub shown_rss: RssConfig,
    /// Flow of each SYN, with its predicted and its actual queue.
    pub syns: Vec<(FourTuple, u16, u16)>,
    /// Verdict on the shown settings: `in_force`, `not_in_force` or `undecided`.
    pub verdict: String,
}

/// Starts `coreward agent rss` and waits until it samples SYNs. Fails when it does not start.
pub fn start_watch(guest: &mut Guest) -> Result<()> {
    let limit = START_TIMEOUT.as_secs();
    guest
        .run(&format!("start rss coreward agent rss --interface eth0 --seconds {limit} --syns {FLOW_COUNT} --json"))?;
    let watching =
        poll(guest, START_TIMEOUT, |guest| Ok(guest.run("cat /tmp/rss.out")?.contains("\"nic\"").then_some(())));
    watching.with_context(|| format!("`coreward agent rss`: {}", log(guest, "rss")))
}

/// Waits until the agent has received all SYNs, and returns its output. Fails when it fails or its output is invalid.
pub fn end_watch(guest: &mut Guest) -> Result<RssWatchOutput> {
    // The exit status depends on the verdict.
    guest.try_run("finished rss", START_TIMEOUT + DETECTION_TIMEOUT)?;
    let (mut shown_rss, mut syns, mut judged) = (None, Vec::new(), None);
    for text in guest.run("cat /tmp/rss.out")?.lines().filter(|line| line.starts_with('{')) {
        match serde_json::from_str(text).with_context(|| text.to_owned())? {
            RssWatchLine::Nic { key, indirection_table } => shown_rss = Some(parse_rss(&key, &indirection_table)?),
            RssWatchLine::Syn { source, destination, predicted_queue, actual_queue } => {
                syns.push((FourTuple::new(source, destination)?, predicted_queue, actual_queue));
            }
            RssWatchLine::End { verdict } => judged = Some(verdict),
        }
    }
    let (Some(shown_rss), Some(verdict)) = (shown_rss, judged) else { bail!("no verdict: {}", log(guest, "rss")) };
    Ok(RssWatchOutput { shown_rss, syns, verdict })
}

fn parse_rss(key: &str, table: &[u32]) -> Result<RssConfig> {
    Ok(RssConfig { key: key.parse::<RssKey>()?, indirection_table: IndirectionTable::new(table)? })
}

/// Controller and agent (with `manage_rss`) that run in a guest.
pub struct Daemons;

impl Daemons {
    /// Starts the controller and the agent, and waits until the agent has reported `expected` as the NIC's RSS
    /// settings. Fails after a time limit, with the ends of both logs.
    pub fn start(guest: &mut Guest, expected: &RssConfig) -> Result<Self> {
        guest.run("start controller coreward controller --config /etc/controller.toml")?;
        guest.run("start agent coreward agent --config /etc/agent.toml")?;
        let reported = poll(guest, START_TIMEOUT, |guest| {
            Ok(server(guest)?.filter(|server| reported_rss(server).is_some_and(|rss| rss == *expected)).map(drop))
        });
        reported.with_context(|| logs(guest))?;
        Ok(Self)
    }

    /// Returns how many SYNs the agent has counted on the predicted queue, and how many on other queues. Fails when the
    /// controller has no counts.
    pub fn counted_syns(&self, guest: &mut Guest) -> Result<(u64, u64)> {
        let server = server(guest)?.context("the controller knows no server")?;
        let count = |name: &str| server[name].as_u64().with_context(|| format!("no {name} in {server}"));
        Ok((count("rss_matched")?, count("rss_mismatched")?))
    }

    /// Waits until the agent has counted `syns` more SYNs than `before`. Returns how many of them arrived on the
    /// predicted queue. Fails after a time limit.
    pub fn wait_for_matched_syns(&self, guest: &mut Guest, before: (u64, u64), syns: u64) -> Result<u64> {
        let matched = poll(guest, DETECTION_TIMEOUT, |guest| {
            let now = self.counted_syns(guest)?;
            Ok((now.0 + now.1 >= before.0 + before.1 + syns).then_some(now.0 - before.0))
        });
        matched.with_context(|| logs(guest))
    }

    /// Waits until the agent warns (or no longer warns) that the RSS table is not in force. Fails after a time limit.
    pub fn wait_for_warning(&self, guest: &mut Guest, expected: bool) -> Result<()> {
        let warned = poll(guest, DETECTION_TIMEOUT, |guest| {
            let Some(server) = server(guest)? else { return Ok(None) };
            Ok((server["warnings"].to_string().contains("not in force") == expected).then_some(()))
        });
        warned.with_context(|| logs(guest))
    }

    /// Stops the agent, and then the controller. Fails when one of them does not end, or the agent exits with an error.
    pub fn stop(self, guest: &mut Guest) -> Result<()> {
        let (status, _) = guest.try_run("stop agent", DETECTION_TIMEOUT)?;
        ensure!(status == 0, "the agent ended with status {status}: {}", log(guest, "agent"));
        guest.try_run("stop controller", DETECTION_TIMEOUT)?;
        guest.run("coreward agent --config /etc/agent.toml --detach")?;
        Ok(())
    }
}

/// Runs a controller and a load balancer until the load balancer's table is in force, which needs RCU grace periods.
/// Fails after a time limit, with the ends of both logs.
pub fn balance(guest: &mut Guest) -> Result<String> {
    guest.run("ip addr add 10.2.0.1/24 dev eth0")?;
    guest.run("start controller coreward controller --config /etc/controller.toml")?;
    guest.run("start lb coreward lb --config /etc/lb.toml")?;
    let generation = poll(guest, START_TIMEOUT, |guest| {
        let status = status(guest)?;
        let in_force =
            status.as_ref().and_then(|all| all["load_balancers"][0]["state"]["table_generations"]["web"].as_u64());
        Ok(in_force.filter(|generation| *generation > 0))
    });
    let generation = generation
        .with_context(|| format!("load balancer: {}\ncontroller: {}", log(guest, "lb"), log(guest, "controller")))?;
    for name in ["lb", "controller"] {
        let (status, _) = guest.try_run(&format!("stop {name}"), DETECTION_TIMEOUT)?;
        ensure!(status == 0, "{name} ended with status {status}: {}", log(guest, name));
    }
    guest.run("coreward lb --config /etc/lb.toml --detach && ip addr del 10.2.0.1/24 dev eth0")?;
    Ok(format!("generation {generation}"))
}

/// Returns the status of the only server, as `coreward status` reports it; `None` if there is none yet.
fn server(guest: &mut Guest) -> Result<Option<Value>> {
    Ok(status(guest)?.and_then(|answer| answer["servers"].get(0).cloned()))
}

/// Returns the output of `coreward status`; `None` while the controller does not answer. Fails when it is no JSON.
pub fn status(guest: &mut Guest) -> Result<Option<Value>> {
    let (status, answer) = guest.try_run(
        "COREWARD_TOKEN_FILE=/run/operator.token coreward status --format json --rss-keys 2>/dev/null",
        DETECTION_TIMEOUT,
    )?;
    if status != 0 {
        return Ok(None);
    }
    Ok(Some(serde_json::from_str(answer.trim()).with_context(|| answer.clone())?))
}

fn reported_rss(server: &Value) -> Option<RssConfig> {
    let table: Option<Vec<u32>> =
        server["rss"]["indirection_table"].as_array()?.iter().map(|queue| queue.as_u64()?.try_into().ok()).collect();
    parse_rss(server["rss"]["key"].as_str()?, &table?).ok()
}

/// Calls `ask` repeatedly until it returns a value. Fails after the time `limit`, or when `ask` fails.
pub fn poll<T>(guest: &mut Guest, limit: Duration, mut ask: impl FnMut(&mut Guest) -> Result<Option<T>>) -> Result<T> {
    let end = Instant::now() + limit;
    loop {
        if let Some(answer) = ask(guest)? {
            return Ok(answer);
        }
        ensure!(Instant::now() < end, "not within {} s", limit.as_secs());
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Returns the last messages in the log of a program that was started in the guest.
pub fn log(guest: &mut Guest, name: &str) -> String {
    guest.run(&format!("tail -n 5 /tmp/{name}.log")).unwrap_or_else(|error| error.to_string()).trim().to_owned()
}

fn logs(guest: &mut Guest) -> String {
    format!("agent: {}\ncontroller: {}", log(guest, "agent"), log(guest, "controller"))
}
