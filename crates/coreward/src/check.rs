//! `coreward check`, which reports all mistakes in configuration files, with the parsers that the daemons use.

use std::path::{Path, PathBuf};

use coreward_config::{ConfigDiagnostic, Diagnostics, TomlSource, build_file_schema};
use coreward_control_server::config::file::ControllerFile;
use coreward_control_server::config::{ControllerConfig, StoreLocation};
use coreward_control_server::server::leader_election;
use coreward_fleet::config::FleetConfig;
use coreward_fleet::config::file::FleetFile;
use serde_json::{Value, json};

use crate::{CommandOutputFormat, print_to_stdout};

#[derive(clap::Args)]
pub struct CheckConfigArgs {
    /// Configuration files of daemons, or the fleet document
    #[arg(value_name = "FILE", required_unless_present = "schema")]
    files: Vec<PathBuf>,
    /// Kind of the files [default: the one that fits best]
    #[arg(long, value_enum)]
    kind: Option<ConfigFileKind>,
    /// Format of the output
    #[arg(long, value_enum, default_value_t = CommandOutputFormat::Text)]
    format: CommandOutputFormat,
    /// Print the JSON schema of a kind of file, for editors
    #[arg(long, value_name = "KIND", value_enum, conflicts_with_all = ["files", "kind"])]
    schema: Option<ConfigFileKind>,
}

/// Kind of configuration file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum ConfigFileKind {
    /// File of `coreward controller`
    Controller,
    /// The fleet document: servers and services
    Fleet,
    /// File of `coreward lb`
    Lb,
    /// File of `coreward agent`
    Agent,
    /// File of `coreward dispatch`
    Dispatch,
    /// File of `coreward orchestrate`
    Orchestrate,
    /// File of `coreward rack`
    Rack,
}

/// Runs `coreward check`. Fails if a file has a mistake.
pub fn run_check(args: &CheckConfigArgs) -> anyhow::Result<()> {
    if let Some(kind) = args.schema {
        return print_to_stdout(&format!("{:#}", kind.json_schema()));
    }
    let mut checked_files = Vec::new();
    for file in &args.files {
        checked_files.push(CheckedConfigFile::new(file, args.kind));
    }
    print_to_stdout(&match args.format {
        CommandOutputFormat::Text => {
            checked_files.iter().map(CheckedConfigFile::to_text).collect::<Vec<_>>().join("\n")
        }
        CommandOutputFormat::Json => {
            format!("{:#}", Value::from_iter(checked_files.iter().map(CheckedConfigFile::to_json)))
        }
    })?;
    let mistake_count: usize = checked_files.iter().map(CheckedConfigFile::count_mistakes).sum();
    let mistake_noun = if mistake_count == 1 { "mistake" } else { "mistakes" };
    anyhow::ensure!(
        mistake_count == 0,
        "{mistake_count} {mistake_noun} in {} of {} files",
        CheckedConfigFile::count_files_with_mistakes(&checked_files),
        checked_files.len()
    );
    Ok(())
}

struct CheckedConfigFile<'a> {
    file: &'a Path,
    /// Kind of the configuration file, or `None` if it could not be detected.
    kind: Option<ConfigFileKind>,
    diagnostics: Option<Diagnostics>,
}

impl<'a> CheckedConfigFile<'a> {
    /// Reads and checks the file. Reads it only once, because it may be a pipe.
    fn new(file: &'a Path, kind: Option<ConfigFileKind>) -> Self {
        let source = match TomlSource::read(file) {
            Ok(source) => source,
            Err(mistake) => return Self { file, kind, diagnostics: Some(mistake.into()) },
        };
        let kind = kind.map_or_else(|| ConfigFileKind::detect(&source), Ok);
        let mistakes = kind.clone().and_then(|kind| kind.check_with_fleet_file(&source)).err();
        Self { file, kind: kind.ok(), diagnostics: mistakes }
    }

    fn count_mistakes(&self) -> usize {
        self.diagnostics
            .as_ref()
            .map_or(0, |mistakes| mistakes.shown_diagnostics.len() + mistakes.omitted_diagnostic_count)
    }

    fn count_files_with_mistakes(checked_files: &[Self]) -> usize {
        checked_files.iter().filter(|checked_file| checked_file.diagnostics.is_some()).count()
    }

    fn to_text(&self) -> String {
        match &self.diagnostics {
            Some(mistakes) => mistakes.to_string(),
            None => format!("{}: ok ({})", self.file.display(), self.kind.map_or("", ConfigFileKind::name)),
        }
    }

    fn to_json(&self) -> Value {
        let mistake_objects = self
            .diagnostics
            .as_ref()
            .map(|mistakes| mistakes.shown_diagnostics.iter().map(|mistake| mistake.to_json()));
        json!({
            "file": self.file,
            "kind": self.kind.map(ConfigFileKind::name),
            "mistakes": mistake_objects.into_iter().flatten().collect::<Vec<_>>(),
            "more": self.diagnostics.as_ref().map_or(0, |mistakes| mistakes.omitted_diagnostic_count),
        })
    }
}

impl ConfigFileKind {
    fn name(self) -> &'static str {
        match self {
            Self::Controller => "controller",
            Self::Fleet => "fleet",
            Self::Lb => "lb",
            Self::Agent => "agent",
            Self::Dispatch => "dispatch",
            Self::Orchestrate => "orchestrate",
            Self::Rack => "rack",
        }
    }

    /// Checks a file in the same way as the daemon that reads it.
    pub fn check_source(self, source: &TomlSource) -> Result<(), Diagnostics> {
        match self {
            Self::Controller => ControllerConfig::parse(source).map(|_| ()),
            Self::Fleet => FleetConfig::parse(source).map(|_| ()),
            Self::Lb => coreward_lb::config::LoadBalancerConfig::parse(source).map(|_| ()),
            Self::Agent => coreward_agent::config::AgentConfig::parse(source).map(|_| ()),
            Self::Dispatch => coreward_dispatch::config::DispatchConfig::parse(source).map(|_| ()),
            Self::Orchestrate => coreward_orchestrator::config::OrchestratorConfig::parse(source).map(|_| ()),
            Self::Rack => coreward_rack::config::RackControllerConfig::parse(source).map(|_| ()),
        }
    }

    /// Returns the JSON schema of this kind of file. Schema and parser are generated from the same description.
    pub fn json_schema(self) -> Value {
        match self {
            Self::Controller => build_file_schema::<ControllerFile>("coreward controller"),
            Self::Fleet => build_file_schema::<FleetFile>("the fleet of coreward"),
            Self::Lb => build_file_schema::<coreward_lb::config::LoadBalancerConfig>("coreward lb"),
            Self::Agent => build_file_schema::<coreward_agent::config::AgentConfig>("coreward agent"),
            Self::Dispatch => {
                build_file_schema::<coreward_dispatch::config::UncheckedDispatchConfig>("coreward dispatch")
            }
            Self::Orchestrate => {
                build_file_schema::<coreward_orchestrator::config::UncheckedOrchestratorConfig>("coreward orchestrate")
            }
            Self::Rack => build_file_schema::<coreward_rack::config::RackControllerConfig>("coreward rack"),
        }
    }

    /// Checks a controller's file together with the fleet document that it names.
    fn check_with_fleet_file(self, source: &TomlSource) -> Result<(), Diagnostics> {
        let file_result = self.check_source(source);
        let fleet_result = match self {
            Self::Controller => {
                find_fleet_file_path(source).map_or(Ok(()), |path| FleetConfig::load(&path).map(|_| ()))
            }
            _ => Ok(()),
        };
        let file_and_etcd_result =
            file_result.and_then(|()| if self == Self::Controller { check_etcd_files(source) } else { Ok(()) });
        match (file_and_etcd_result, fleet_result) {
            (Ok(()), fleet_result) => fleet_result,
            (own_result, Ok(())) => own_result,
            (Err(own_mistakes), Err(fleet_mistakes)) => Err(Diagnostics {
                shown_diagnostics: [own_mistakes.shown_diagnostics, fleet_mistakes.shown_diagnostics].concat(),
                omitted_diagnostic_count: own_mistakes.omitted_diagnostic_count
                    + fleet_mistakes.omitted_diagnostic_count,
            }),
        }
    }

    /// Returns the kind that knows most of the file's keys. Among equal kinds, prefers the one in the file's name, then
    /// the one with the fewest mistakes. Fails if several kinds remain.
    fn detect(source: &TomlSource) -> Result<Self, Diagnostics> {
        let keys = source.top_level_keys();
        let name = source.path().file_stem().and_then(|name| name.to_str()).unwrap_or_default();
        let compute_mismatch = |kind: Self| {
            let schema = kind.json_schema();
            let unknown_key_count = keys.iter().filter(|key| schema["properties"].get(key.as_str()).is_none()).count();
            let mistake_count = kind
                .check_source(source)
                .err()
                .map_or(0, |mistakes| mistakes.shown_diagnostics.len() + mistakes.omitted_diagnostic_count);
            (unknown_key_count, !name.starts_with(kind.name()), mistake_count)
        };
        let kinds_with_mismatch =
            <Self as clap::ValueEnum>::value_variants().iter().map(|kind| (compute_mismatch(*kind), *kind));
        let mut kinds_by_mismatch: Vec<((usize, bool, usize), Self)> = kinds_with_mismatch.collect();
        kinds_by_mismatch.sort_by_key(|(misfit_rank, _)| *misfit_rank);
        if kinds_by_mismatch[0].0 < kinds_by_mismatch[1].0 {
            return Ok(kinds_by_mismatch[0].1);
        }
        let message = "fits several kinds of files: expected `--kind`, or a name that begins with its kind";
        let mut diagnostics = vec![ConfigDiagnostic::for_file(source.path(), message)];
        diagnostics.extend(source.syntax_errors());
        Err(Diagnostics { shown_diagnostics: diagnostics, omitted_diagnostic_count: 0 })
    }
}

/// Checks the certificate files of `[etcd.tls]` in the same way as the controller.
fn check_etcd_files(controller: &TomlSource) -> Result<(), Diagnostics> {
    let StoreLocation::Etcd(etcd) = ControllerConfig::parse(controller)?.store else { return Ok(()) };
    let to_diagnostics =
        |error| ConfigDiagnostic::for_file(controller.path(), &format!("[etcd.tls]: {error:#}")).into();
    leader_election::connect_cluster(&etcd).map(drop).map_err(to_diagnostics)
}

/// Returns the path of the fleet document that a controller's file names. Ignores mistakes in other keys.
fn find_fleet_file_path(controller: &TomlSource) -> Option<PathBuf> {
    let table: toml::Table = controller.parse().ok()?;
    Some(controller.path().parent()?.join(table.get("fleet")?.as_str()?))
}

#[cfg(test)]
mod tests {
    use clap::ValueEnum as _;

    use super::*;

    /// Returns the location (page and line) and the text of each TOML block on the manual pages about configuration
    /// files. A block that begins with `[[dispatch` is appended to the preceding agent's file.
    fn read_documented_examples() -> Vec<(String, String)> {
        let pages = [
            ("config.md", include_str!("../../../docs/config.md")),
            ("deployment.md", include_str!("../../../docs/deployment.md")),
            ("dispatch.md", include_str!("../../../docs/dispatch.md")),
            ("orchestrate.md", include_str!("../../../docs/orchestrate.md")),
        ];
        let mut blocks: Vec<(String, String)> = Vec::new();
        for (page, text) in pages {
            let mut lines = text.lines().enumerate();
            while let Some((number, _)) = lines.by_ref().find(|(_, line)| *line == "```toml") {
                let block: Vec<&str> =
                    lines.by_ref().map(|(_, line)| line).take_while(|line| !line.starts_with("```")).collect();
                let block = block.join("\n") + "\n";
                match block.starts_with("[[dispatch") {
                    true => blocks.last_mut().expect("the agent's file is above").1 += &block,
                    false => blocks.push((format!("{page}:{}", number + 1), block)),
                }
            }
        }
        blocks
    }

    fn detect_kind(text: &str) -> Result<ConfigFileKind, Diagnostics> {
        ConfigFileKind::detect(&TomlSource::from_text("some.toml", text))
    }

    fn schema_accepts(schema: &Value, text: &str) -> bool {
        let value: toml::Value = toml::from_str(text).unwrap();
        jsonschema::is_valid(schema, &serde_json::to_value(value).unwrap())
    }

    /// Checks that each example is valid, of a known kind, and accepted by its schema. With an unknown key, the parser
    /// and the schema reject it.
    #[test]
    fn toml_examples_in_the_manual_are_valid() {
        let mut found_kinds = Vec::new();
        for (page_line, toml_text) in read_documented_examples() {
            let kind = detect_kind(&toml_text).unwrap_or_else(|mistakes| panic!("{page_line}: {mistakes}"));
            let outcome = kind.check_source(&TomlSource::from_text(&page_line, &toml_text));
            let mistakes = outcome.err().map_or_else(Vec::new, |mistakes| mistakes.shown_diagnostics);
            // The certificate files of the examples do not exist on this machine.
            let is_missing_certificate = |mistake: &ConfigDiagnostic| {
                mistake.key.starts_with("tls.") && mistake.problem.contains("No such file or directory")
            };
            assert!(mistakes.iter().all(is_missing_certificate), "{page_line}: {mistakes:?}");
            assert!(schema_accepts(&kind.json_schema(), &toml_text), "{page_line} as {}", kind.name());
            let text_with_unknown_key = format!("colour = \"red\"\n{toml_text}");
            assert!(
                kind.check_source(&TomlSource::from_text(&page_line, &text_with_unknown_key)).is_err(),
                "{page_line}"
            );
            assert!(!schema_accepts(&kind.json_schema(), &text_with_unknown_key), "{page_line} as {}", kind.name());
            found_kinds.push(kind.name());
        }
        for kind in ConfigFileKind::value_variants() {
            assert!(found_kinds.contains(&kind.name()), "no document of {} in {found_kinds:?}", kind.name());
        }
    }

    #[test]
    fn etcd_files_are_checked() {
        let text = "listen = \"127.0.0.1:7400\"\n[etcd]\nendpoints = [\"https://127.0.0.1:2379\"]\n\
                    [etcd.tls]\nca = \"/nonexistent/ca.crt\"\n";
        let mistakes = ConfigFileKind::Controller
            .check_with_fleet_file(&TomlSource::from_text("controller.toml", text))
            .unwrap_err();
        let text = mistakes.to_string();
        assert!(
            text.starts_with("controller.toml: [etcd.tls]: /nonexistent/ca.crt: expected a readable file"),
            "{text}"
        );
    }

    #[test]
    fn nested_unknown_key_is_rejected_by_the_schema() {
        let cases = [
            (ConfigFileKind::Fleet, "[[server]]\nname = \"s1\"\naddress = \"10.0.0.1\"\n", "colour = 1\n"),
            (ConfigFileKind::Dispatch, "[[service]]\nlisten = \"0.0.0.0:53\"\n", "other = { colour = 1 }\n"),
            (
                ConfigFileKind::Lb,
                "name = \"a\"\ncontroller = \"[::1]:1\"\ninterface = \"e\"\npin_directory = \"/p\"\n",
                "connection_timers = { idle_s = 1 }\n",
            ),
        ];
        for (kind, valid_text, unknown_key_line) in cases {
            let text_with_unknown_key = format!("{valid_text}{unknown_key_line}");
            let schema = kind.json_schema();
            assert!(
                schema_accepts(&schema, valid_text)
                    && kind.check_source(&TomlSource::from_text("f", valid_text)).is_ok(),
                "{valid_text}"
            );
            assert!(
                !schema_accepts(&schema, &text_with_unknown_key)
                    && kind.check_source(&TomlSource::from_text("f", &text_with_unknown_key)).is_err(),
                "{text_with_unknown_key}"
            );
        }
    }

    #[test]
    fn file_kind_is_detected_despite_mistakes() {
        for (text, kind) in [
            (
                "name = \"lb1\"\ncontroler = \"10.1.0.1:7400\"\ninterface = \"eth0\"\npin_directory = \"/p\"\n",
                ConfigFileKind::Lb,
            ),
            (
                "server = \"s1\"\ncontroller = \"10.1.0.1:7400\"\ninterface = 5\nmanage_rss = true\n",
                ConfigFileKind::Agent,
            ),
            ("listen = \"10.1.0.1\"\nstore = \"s\"\n", ConfigFileKind::Controller),
            ("[[service]]\nname = \"web\"\nvip = \"10.0.0.1\"\n", ConfigFileKind::Fleet),
            // As a controller's file this has fewer mistakes, because that parser knows where these tables moved.
            (
                "[[server]]\nweight = -1\nid = 9\n[[server]]\nnam = 1\n[[service]]\nvip = 1\nx = 1\n",
                ConfigFileKind::Fleet,
            ),
            (
                "name = \"\"\ncontroller = []\ninterface = \"\"\npin_directory = \"\"\nxdp_mode = 1\n",
                ConfigFileKind::Lb,
            ),
        ] {
            assert_eq!(detect_kind(text).unwrap(), kind, "{text}");
        }
        let text = CheckedConfigFile::new(Path::new("/nonexistent/lb.toml"), None).to_text();
        assert!(text.starts_with("/nonexistent/lb.toml: No such file"), "{text}");
    }

    #[test]
    fn file_name_decides_the_kind_if_keys_are_ambiguous() {
        let detect_kind_of_text = |name: &str, text: &str| {
            ConfigFileKind::detect(&TomlSource::from_text(name, text)).map_err(|mistakes| mistakes.to_string())
        };
        assert_eq!(detect_kind_of_text("etc/lb2.toml", "metrics = 1\n"), Ok(ConfigFileKind::Lb));
        assert_eq!(detect_kind_of_text("etc/rack.toml", ""), Ok(ConfigFileKind::Rack));
        // Here the keys decide, not the file's name.
        assert_eq!(detect_kind_of_text("lb.toml", "server = \"s1\"\nmanage_rss = true\n"), Ok(ConfigFileKind::Agent));
        // Text that is not valid TOML has no keys, so the kind is unknown and the syntax error is reported.
        let error = detect_kind_of_text("some.toml", "= 5\n").unwrap_err();
        assert!(error.contains("some.toml: fits several kinds") && error.contains("some.toml:1:1: "), "{error}");
    }

    /// Checks that the text is read only once, as `coreward check <(...)` requires, because it comes from a pipe.
    #[test]
    fn checked_pipe_is_read_once() {
        let directory = tempfile::tempdir().unwrap();
        let pipe = directory.path().join("some");
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        let pipe_path = pipe.clone();
        let writer = std::thread::spawn(move || std::fs::write(pipe_path, "[[server]]\nname = \"s1\"\n").unwrap());
        let checked_file = CheckedConfigFile::new(&pipe, None);
        writer.join().unwrap();
        assert_eq!(
            (checked_file.kind, checked_file.count_mistakes()),
            (Some(ConfigFileKind::Fleet), 1),
            "{}",
            checked_file.to_text()
        );
    }

    /// Checks that a controller's file and its fleet document are both checked, even if both have mistakes.
    #[test]
    fn controller_file_and_its_fleet_document_are_both_checked() {
        let directory = tempfile::tempdir().unwrap();
        let [controller, fleet] = ["controller.toml", "fleet.toml"].map(|name| directory.path().join(name));
        std::fs::write(&controller, "listen = 5\nstore = \"s\"\nfleet = \"fleet.toml\"\n").unwrap();
        std::fs::write(&fleet, "load_ewma_alpha = 2\n[[server]]\nname = \"s1\"\n").unwrap();
        let check_both_files =
            || ConfigFileKind::Controller.check_with_fleet_file(&TomlSource::read(&controller).unwrap());
        let mistakes = check_both_files().unwrap_err();
        let files: Vec<&Path> = mistakes.shown_diagnostics.iter().map(|mistake| &*mistake.file).collect();
        assert_eq!(files, [&controller, &fleet, &fleet]);
        std::fs::remove_file(&fleet).unwrap();
        let mistakes = check_both_files().unwrap_err();
        assert_eq!(mistakes.shown_diagnostics.len(), 2, "{mistakes}");
    }
}
