//! etcd of several controllers: three members, each of which can be killed or stopped.

use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use coreward_etcd::local::Member;
use nix::sys::signal::Signal;
use serde_json::Value;

use crate::process::Process;
use crate::topology::Testbed;

/// Number of etcd members, of which one may fail.
pub const MEMBER_COUNT: u16 = 3;
/// First port of the etcd members in the controllers' namespace, where no other program uses it.
const FIRST_PORT: u16 = 2379;
const START_LIMIT: Duration = Duration::from_secs(20);
const END_LIMIT: Duration = Duration::from_secs(5);

/// Running etcd cluster, whose members are killed when it is dropped.
#[derive(Debug)]
pub struct Etcd<'a> {
    testbed: &'a Testbed,
    members: Vec<Member>,
    /// Process of member `number` at index `number - 1`.
    processes: Vec<Process>,
    directory: PathBuf,
}

impl<'a> Etcd<'a> {
    /// Starts all members and waits for a leader. Fails when etcd (Debian package etcd-server) cannot be started, or
    /// when no leader is elected in time.
    pub fn start(testbed: &'a Testbed) -> anyhow::Result<Self> {
        let members = Member::cluster(MEMBER_COUNT, IpAddr::V4(Ipv4Addr::LOCALHOST), FIRST_PORT);
        let directory = testbed.directory();
        let mut etcd = Self { testbed, members, processes: Vec::new(), directory };
        for number in 1..=MEMBER_COUNT {
            let process = etcd.spawn(number)?;
            etcd.processes.push(process);
        }
        let end = Instant::now() + START_LIMIT;
        while etcd.leader().is_err() {
            ensure!(Instant::now() < end, "etcd has no leader after {START_LIMIT:?}");
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(etcd)
    }

    /// Returns the members' endpoints, as in the controllers' configuration files.
    pub fn endpoints(&self) -> Vec<String> {
        self.members.iter().map(Member::endpoint).collect()
    }

    /// Returns the number of the leading member. Fails when there is no leader.
    pub fn leader(&self) -> anyhow::Result<u16> {
        let mut command = Command::new("etcdctl");
        command.env("ETCDCTL_API", "3").args(["endpoint", "status", "--write-out", "json", "--command-timeout", "2s"]);
        command.args(["--endpoints", &self.endpoints().join(",")]);
        let answer = self.testbed.run(self.testbed.controller(), command)?;
        let members: Vec<Value> = serde_json::from_slice(&answer.stdout)?;
        let leads = |member: &&Value| {
            let status = &member["Status"];
            status["leader"].as_u64().is_some_and(|leader| leader > 0 && status["header"]["member_id"] == leader)
        };
        let endpoint = members.iter().find(leads).and_then(|member| member["Endpoint"].as_str());
        let endpoint = endpoint.context("etcd has no leader")?;
        let position = self.members.iter().position(|member| member.endpoint() == endpoint);
        Ok(position.context("etcd's leader is none of its members")? as u16 + 1)
    }

    /// Sends a signal to a member. Fails when the member does not exist or has ended.
    pub fn signal(&self, number: u16, signal: Signal) -> anyhow::Result<()> {
        self.processes.get(usize::from(number) - 1).context("no such member")?.signal(signal)
    }

    /// Kills the process of a member. Fails when the member does not exist.
    pub fn kill(&mut self, number: u16) -> anyhow::Result<()> {
        self.signal(number, Signal::SIGKILL)?;
        self.processes[usize::from(number) - 1].wait(END_LIMIT).map(drop)
    }

    /// Restarts a killed member with its data. Fails when it cannot be started.
    pub fn restart(&mut self, number: u16) -> anyhow::Result<()> {
        self.processes[usize::from(number) - 1] = self.spawn(number)?;
        Ok(())
    }

    fn spawn(&self, number: u16) -> anyhow::Result<Process> {
        let member = &self.members[usize::from(number) - 1];
        let command = member.command(&self.members, &self.directory);
        self.testbed.spawn(self.testbed.controller(), command).context("etcd (Debian package etcd-server)")
    }
}
