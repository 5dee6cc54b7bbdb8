package main

import (
	"bytes"
	"crypto/sha256"
	"encoding/gob"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"
)

// object is what a compilation made. Its file begins with a digest of the file's name and of the rest, so
// that a damaged or misplaced file is never embedded.
type object struct {
	image []byte
	log   string // what ptxas said
}

// content is an object as it is encoded.
type content struct {
	Image []byte
	Log   string
}

func digest(path string, encoded []byte) [sha256.Size]byte {
	return sha256.Sum256(append([]byte(filepath.Base(path)+"\n"), encoded...))
}

func (o *object) read(path string) error {
	data, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	if len(data) < sha256.Size || digest(path, data[sha256.Size:]) != [sha256.Size]byte(data[:sha256.Size]) {
		return fmt.Errorf("%s does not match its digest", path)
	}
	var c content
	if err := gob.NewDecoder(bytes.NewReader(data[sha256.Size:])).Decode(&c); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	o.image, o.log = c.Image, c.Log
	return nil
}

func (o *object) write(path string) error {
	var encoded bytes.Buffer
	if err := gob.NewEncoder(&encoded).Encode(content{o.image, o.log}); err != nil {
		return err
	}
	sum := digest(path, encoded.Bytes())
	return writeFile(path, append(sum[:], encoded.Bytes()...))
}

// temporary begins the name of a file that is not complete.
const temporary = ".new-"

// writeFile writes through a rename, so that another process never reads half a file. The data is synced
// before the rename and the folder after it, so that a crash of the machine leaves no half a file either.
func writeFile(path string, data []byte) error {
	file, err := os.CreateTemp(filepath.Dir(path), temporary)
	if err != nil {
		return err
	}
	_, err = file.Write(data)
	err = errors.Join(err, file.Chmod(0o644), file.Sync(), file.Close())
	if err == nil {
		err = os.Rename(file.Name(), path)
	}
	if err != nil {
		return errors.Join(err, os.Remove(file.Name()))
	}
	return syncFolder(filepath.Dir(path))
}

func syncFolder(path string) error {
	folder, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(folder.Sync(), folder.Close())
}

// removeAbandoned removes temporary files of killed processes: writing one takes far less than an hour.
func removeAbandoned(folder string) error {
	paths, err := filepath.Glob(filepath.Join(folder, temporary+"*"))
	if err != nil {
		return err
	}
	for _, path := range paths {
		info, err := os.Stat(path)
		if err != nil || time.Since(info.ModTime()) < time.Hour {
			continue // gone by now, or in use
		}
		if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	return nil
}
