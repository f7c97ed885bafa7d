//! Whether a command's program is there, before it is started.

use std::io;

use tokio::process::Command;

/// Looks for the program as the child would. Errs on the side of "it is there": only what is plainly missing
/// is an error.
#[cfg(unix)]
pub(super) fn find(command: &Command) -> io::Result<()> {
    use std::{
        ffi::OsStr,
        os::unix::{ffi::OsStrExt, fs::PermissionsExt},
        path::{Path, PathBuf},
    };

    let command = command.as_std();
    let program = command.get_program();
    let missing = || io::Error::from(io::ErrorKind::NotFound);
    if program.is_empty() {
        return Err(missing());
    }
    // A relative path is looked up from where the child starts.
    let from = |path: &Path| match command.get_current_dir() {
        Some(dir) => dir.join(path),
        None => path.to_owned(),
    };
    let check = |path: PathBuf| match std::fs::metadata(from(&path)) {
        Ok(meta) if meta.is_file() && meta.permissions().mode() & 0o111 != 0 => Ok(()),
        Ok(_) => Err(io::ErrorKind::PermissionDenied.into()),
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            Err(error)
        }
        // It may well be there, where we cannot look.
        Err(_) => Ok(()),
    };
    if program.as_bytes().contains(&b'/') {
        return check(program.into());
    }
    let own = command.get_envs().find(|(name, _)| *name == OsStr::new("PATH"));
    let path = match own {
        Some((_, path)) => path.map(OsStr::to_owned),
        None => std::env::var_os("PATH"),
    };
    // What is searched without PATH, which a cleared environment has not got either, though we cannot see that.
    let default = ["/bin", "/usr/bin", "/usr/local/bin"].map(PathBuf::from);
    let found = path
        .iter()
        .flat_map(std::env::split_paths)
        .chain(default)
        .any(|dir| check(dir.join(program)).is_ok());
    if found { Ok(()) } else { Err(missing()) }
}

/// The rules elsewhere are many: the attempt to start it will tell.
#[cfg(not(unix))]
pub(super) fn find(_: &Command) -> io::Result<()> {
    Ok(())
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    #[test]
    fn a_program_is_found_where_the_child_would_find_it() {
        let dir = tempfile::tempdir().unwrap();
        let script = dir.path().join("goaround-tool");
        std::fs::write(&script, "#!/bin/sh\n").unwrap();
        let kind = |command: &Command| find(command).map_err(|error| error.kind());

        assert_eq!(kind(&Command::new(&script)), Err(io::ErrorKind::PermissionDenied));
        use std::os::unix::fs::PermissionsExt;
        std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755)).unwrap();
        assert_eq!(kind(&Command::new(&script)), Ok(()));
        assert_eq!(kind(Command::new("./goaround-tool").current_dir(dir.path())), Ok(()));
        assert_eq!(kind(&Command::new("./goaround-tool")), Err(io::ErrorKind::NotFound));

        assert_eq!(kind(&Command::new("goaround-tool")), Err(io::ErrorKind::NotFound));
        assert_eq!(kind(Command::new("goaround-tool").env("PATH", dir.path())), Ok(()));
        assert_eq!(
            kind(Command::new("goaround-tool").env("PATH", "bin").current_dir(dir.path())),
            Err(io::ErrorKind::NotFound)
        );
        assert_eq!(kind(&Command::new("sh")), Ok(()));
        assert_eq!(kind(Command::new("sh").env_remove("PATH")), Ok(()));
        assert_eq!(kind(&Command::new("")), Err(io::ErrorKind::NotFound));
        assert_eq!(kind(&Command::new(dir.path())), Err(io::ErrorKind::PermissionDenied));
        assert_eq!(kind(&Command::new("a\0b")), Err(io::ErrorKind::NotFound));
    }
}
