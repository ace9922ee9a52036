//! Bearer tokens, one for each role, in files on the controller's machine that only their owner can read.

use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, anyhow, ensure};
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use coreward_config::{Secret, read_secret};
use parking_lot::RwLock;
use rand::rand_core::{TryRng as _, UnwrapErr};
use rand::rngs::SysRng;
use subtle::ConstantTimeEq as _;

use coreward_api::Role;

/// Number of random bytes in a generated token.
const GENERATED_TOKEN_RANDOM_BYTES: usize = 32;
/// Number of random bytes in the name of a temporary token file.
const TEMPORARY_NAME_RANDOM_BYTES: usize = 9;
/// Minimum length of a token in characters, for tokens that an operator has chosen.
const MIN_TOKEN_CHARS: usize = 32;

/// Returns the path of the file in `directory` that contains a role's token.
pub fn token_file_path(directory: &Path, role: Role) -> PathBuf {
    directory.join(format!("{role}.token"))
}

/// API tokens of all roles, which are read from the files in one directory.
#[derive(Debug)]
pub struct ApiTokens {
    directory: PathBuf,
    tokens: RwLock<Vec<(Role, Secret<String>)>>,
}

impl ApiTokens {
    /// Reads the tokens from their files in this directory, and creates missing files. Fails if a file cannot be read
    /// or written, if users other than its owner can read it, or if it contains no valid token.
    pub fn open(directory: &Path) -> anyhow::Result<Self> {
        let tokens = Self { directory: directory.to_owned(), tokens: RwLock::default() };
        tokens.reload()?;
        Ok(tokens)
    }

    /// Reads the token files again, and returns whether a token has changed. Fails for the same reasons as
    /// [`open`](Self::open), and then keeps the previous tokens.
    pub fn reload(&self) -> anyhow::Result<bool> {
        let read_token_of_role =
            |role| read_or_create_token(&token_file_path(&self.directory, role)).map(|token| (role, token));
        let tokens = Role::ALL.into_iter().map(read_token_of_role).collect::<anyhow::Result<Vec<_>>>()?;
        ensure!(
            tokens[0].1.expose() != tokens[1].1.expose(),
            "the roles' tokens in {} are the same: expected one for each",
            self.directory.display()
        );
        let mut current_tokens = self.tokens.write();
        let current_token_texts = current_tokens.iter().map(|(_, token)| token.expose());
        let has_changed = !current_token_texts.eq(tokens.iter().map(|(_, token)| token.expose()));
        *current_tokens = tokens;
        Ok(has_changed)
    }

    /// Returns the role that this token grants, or `None` if the token is unknown. The comparison takes constant time.
    pub fn role_of_token(&self, token: &str) -> Option<Role> {
        let tokens = self.tokens.read();
        let is_equal_in_constant_time = |(_, stored_token): &&(Role, Secret<String>)| {
            stored_token.expose().as_bytes().ct_eq(token.as_bytes()).into()
        };
        tokens.iter().find(is_equal_in_constant_time).map(|(role, _)| *role)
    }
}

fn read_or_create_token(path: &Path) -> anyhow::Result<Secret<String>> {
    if !path.exists() {
        create_token_file(path, &generate_random_base64::<GENERATED_TOKEN_RANDOM_BYTES>())
            .with_context(|| format!("{}: the token cannot be written", path.display()))?;
        tracing::info!(
            event = "token-created",
            file = %path.display(),
            "the controller has created a new API token in a file"
        );
    }
    read_token(path)
}

/// Returns the token in a file. Fails if the file cannot be read, if users other than its owner can read it, or if it
/// contains no valid token.
pub fn read_token(path: &Path) -> anyhow::Result<Secret<String>> {
    let text = read_secret(path).map_err(|problem| anyhow!("{problem}"))?;
    // Characters of bearer tokens (RFC 6750, Sect. 2.1).
    let is_token_character = |c: char| c.is_ascii_alphanumeric() || "-._~+/=".contains(c);
    ensure!(
        text.len() >= MIN_TOKEN_CHARS && text.chars().all(is_token_character),
        "{} holds no token: expected at least {MIN_TOKEN_CHARS} characters out of A-Z a-z 0-9 - . _ ~ + / = (without \
         the file a new one is drawn)",
        path.display()
    );
    Ok(Secret::new(text))
}

fn generate_random_base64<const BYTES: usize>() -> String {
    let mut random_bytes = [0; BYTES];
    let Ok(()) = UnwrapErr(SysRng).try_fill_bytes(&mut random_bytes);
    URL_SAFE_NO_PAD.encode(random_bytes)
}

/// Creates the token file atomically, even if the machine crashes. If several controllers share the directory, the
/// first one creates the token and the others use it.
fn create_token_file(path: &Path, token: &str) -> std::io::Result<()> {
    // The name is random, because process ids can be equal in two containers that share a directory.
    let temporary_path =
        path.with_extension(format!("new-{}", generate_random_base64::<TEMPORARY_NAME_RANDOM_BYTES>()));
    let mut file = std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&temporary_path)?;
    let result = writeln!(file, "{token}").and_then(|()| file.sync_all()).and_then(|()| {
        // Unlike a rename, a link never replaces an existing file.
        std::fs::hard_link(&temporary_path, path)
    });
    std::fs::remove_file(&temporary_path)?;
    match result {
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => Ok(()),
        result => result,
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn tokens_are_created_once_and_kept_secret() {
        let directory = tempfile::tempdir().unwrap();
        let directory_path = directory.path();
        let tokens = ApiTokens::open(directory_path).unwrap();
        let [viewer, operator] = Role::ALL.map(|role| {
            let path = token_file_path(directory_path, role);
            assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
            std::fs::read_to_string(path).unwrap().trim().to_owned()
        });
        assert_ne!(viewer, operator);
        assert_eq!(viewer.len(), 43);
        for tokens in [tokens, ApiTokens::open(directory_path).unwrap()] {
            assert_eq!(tokens.role_of_token(&viewer), Some(Role::Viewer));
            assert_eq!(tokens.role_of_token(&operator), Some(Role::Operator));
            assert_eq!(tokens.role_of_token(&operator[1..]), None);
            assert_eq!(tokens.role_of_token(""), None);
            assert!(!format!("{tokens:?}").contains(&viewer));
        }
    }

    /// Simulates several controllers with equal process ids, as two containers may have, by threads of one process.
    #[test]
    fn concurrent_controllers_create_the_same_tokens() {
        for _ in 0..20 {
            let directory = tempfile::tempdir().unwrap();
            let barrier = std::sync::Barrier::new(8);
            let token_sets: Vec<ApiTokens> = std::thread::scope(|scope| {
                let open_tokens_concurrently = || {
                    barrier.wait();
                    ApiTokens::open(directory.path()).unwrap()
                };
                let threads: Vec<_> = (0..8).map(|_| scope.spawn(open_tokens_concurrently)).collect();
                threads.into_iter().map(|thread| thread.join().unwrap()).collect()
            });
            for role in Role::ALL {
                let token_text = std::fs::read_to_string(token_file_path(directory.path(), role)).unwrap();
                assert!(token_sets.iter().all(|tokens| tokens.role_of_token(token_text.trim()) == Some(role)));
            }
            let file_count = std::fs::read_dir(directory.path()).unwrap().count();
            assert_eq!(file_count, Role::ALL.len(), "nothing that is unfinished is left");
        }
    }

    #[test]
    fn reload_rejects_invalid_token_and_keeps_old_token() {
        let directory = tempfile::tempdir().unwrap();
        let directory_path = directory.path();
        let tokens = ApiTokens::open(directory_path).unwrap();
        let path = token_file_path(directory_path, Role::Operator);
        let old_token = std::fs::read_to_string(&path).unwrap();
        for (invalid_token, expected) in [("short", "expected at least 32"), (&"ä".repeat(40), "expected at least 32")]
        {
            std::fs::write(&path, invalid_token).unwrap();
            let error = tokens.reload().unwrap_err().to_string();
            assert!(error.contains(expected) && !error.contains(invalid_token), "{error}");
        }
        assert_eq!(tokens.role_of_token(old_token.trim()), Some(Role::Operator));
        std::fs::copy(token_file_path(directory_path, Role::Viewer), &path).unwrap();
        assert!(tokens.reload().unwrap_err().to_string().contains("expected one for each"));
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o644)).unwrap();
        assert!(tokens.reload().unwrap_err().to_string().contains("chmod 600"));
        std::fs::remove_file(&path).unwrap();
        assert!(tokens.reload().unwrap() && !tokens.reload().unwrap(), "others, and then the same");
        assert_eq!(tokens.role_of_token(old_token.trim()), None);
    }
}
